//! Writes metrics in a text format, which is OpenMetrics 1.0 or the older Prometheus text format 0.0.4. Also selects
//! the format from a request's `Accept` header. The parent module chooses the metrics and their values.

use std::fmt::{Display, Write as _};

use bulkhead_shared::vocabulary;

/// Text format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    OpenMetrics,
    /// The Prometheus format, `text/plain; version=0.0.4`.
    Classic,
}

impl Format {
    pub(crate) const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Classic => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// Selects the format with the highest weight in an `Accept` header. If weights are equal, selects the format
    /// listed first. Defaults to OpenMetrics, unless its weight is 0.
    pub(crate) fn from_accept(accept: &str) -> Self {
        let (mut best, mut default) = (None, Self::OpenMetrics);
        for range in accept.split(',') {
            let Some((format, weight)) = Self::from_media_range(range) else { continue };
            if weight > 0.0 && best.is_none_or(|(_, most)| weight > most) {
                best = Some((format, weight));
            } else if weight == 0.0 && format == Self::OpenMetrics {
                default = Self::Classic;
            }
        }
        best.map_or(default, |(format, _)| format)
    }

    /// Parses one media range of an `Accept` header. Returns the matching format with its weight, or `None`
    /// if the range matches neither format.
    fn from_media_range(range: &str) -> Option<(Self, f64)> {
        let mut parts = range.split(';').map(str::trim);
        let kind = parts.next()?.to_ascii_lowercase();
        let (mut version, mut weight) = (None, 1.0);
        for (name, value) in parts.filter_map(|part| part.split_once('=')) {
            match name.trim().to_ascii_lowercase().as_str() {
                "version" => version = Some(value.trim().trim_matches('"')),
                "q" => weight = value.trim().parse().ok()?,
                _ => {}
            }
        }
        let format = match (kind.as_str(), version) {
            ("application/openmetrics-text", None | Some("0.0.1" | "1.0.0")) => Self::OpenMetrics,
            ("text/plain", None | Some("0.0.4")) | ("text/*" | "text/html", _) => Self::Classic,
            _ => return None,
        };
        Some((format, weight))
    }
}

vocabulary! {
    /// Kind of a metric family.
    Kind {
        /// A counter, which never decreases. The names of its samples end in `_total`.
        Counter = "counter",
        Gauge = "gauge",
        Histogram = "histogram",
    }
}

/// Name, kind, labels and help text of a metric family.
#[derive(Debug)]
pub(super) struct FamilyInfo {
    /// Name of the family, without the `_total` suffix.
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) labels: &'static [&'static str],
    pub(super) help: &'static str,
}

/// Initial capacity of a page, in bytes. Large enough for a few bulkheads.
const PAGE_BYTES: usize = 256 * 1024;

/// Builder for a page that contains metrics in a text format.
pub(super) struct Page {
    format: Format,
    text: String,
    family: Option<&'static FamilyInfo>,
    /// Buffer for the common prefix of a group of lines. Stored here to reuse its allocation.
    common: String,
    #[cfg(test)]
    pub(super) families: Vec<&'static str>,
}

impl Page {
    pub(super) fn new(format: Format) -> Self {
        Self {
            format,
            text: String::with_capacity(PAGE_BYTES),
            family: None,
            common: String::new(),
            #[cfg(test)]
            families: Vec::new(),
        }
    }

    /// Begins a metric family. All samples belong to this family until the next call.
    pub(super) fn family(&mut self, family: &'static FamilyInfo) {
        #[cfg(test)]
        self.families.push(family.name);
        let suffix = match (self.format, family.kind) {
            (Format::Classic, Kind::Counter) => "_total",
            _ => "",
        };
        let FamilyInfo { name, kind, help, .. } = family;
        self.write(format_args!("# HELP {name}{suffix} {help}\n"));
        self.write(format_args!("# TYPE {name}{suffix} {}\n", kind.name()));
        self.family = Some(family);
    }

    /// Writes a sample of a counter or a gauge.
    pub(super) fn sample(&mut self, values: &[&str], number: impl Display) {
        self.line(self.suffix(), values, number);
    }

    /// Writes several samples of a counter or gauge. The samples differ only in the value of the last label.
    pub(super) fn samples<'v>(&mut self, values: &[&str], lasts: impl IntoIterator<Item = (&'v str, u64)>) {
        let Some(FamilyInfo { labels: [.., label], .. }) = self.family else { return };
        self.lines(self.suffix(), values, label, lasts);
    }

    /// Writes the buckets of a histogram. Each bucket is labelled with its upper bound.
    pub(super) fn buckets<'v>(&mut self, values: &[&str], counts: impl IntoIterator<Item = (&'v str, u64)>) {
        self.lines("_bucket", values, "le", counts);
    }

    /// Returns the suffix to append to the family's name in each of its samples.
    fn suffix(&self) -> &'static str {
        match self.family {
            Some(FamilyInfo { kind: Kind::Counter, .. }) => "_total",
            _ => "",
        }
    }

    /// Writes one line of the current family.
    pub(super) fn line(&mut self, suffix: &str, values: &[&str], number: impl Display) {
        let Some(family) = self.family else { return };
        debug_assert_eq!(family.labels.len(), values.len(), "{}", family.name);
        begin(&mut self.text, family, suffix, values);
        self.text.push_str(if values.is_empty() { " " } else { "} " });
        self.write(format_args!("{number}\n"));
    }

    /// Writes lines that differ only in the value of the last label. The common prefix is formatted only
    /// once, because a page can have thousands of such lines.
    fn lines<'v>(
        &mut self,
        suffix: &str,
        values: &[&str],
        last: &str,
        lasts: impl IntoIterator<Item = (&'v str, u64)>,
    ) {
        let Some(family) = self.family else { return };
        self.common.clear();
        begin(&mut self.common, family, suffix, values);
        self.common.push(if values.is_empty() { '{' } else { ',' });
        self.common.push_str(last);
        self.common.push_str("=\"");
        let mut digits = itoa::Buffer::new();
        for (value, number) in lasts {
            self.text.push_str(&self.common);
            push_escaped(&mut self.text, value);
            self.text.push_str("\"} ");
            self.text.push_str(digits.format(number));
            self.text.push('\n');
        }
    }

    fn write(&mut self, text: std::fmt::Arguments<'_>) {
        // Writing to a `String` cannot fail.
        let _ = self.text.write_fmt(text);
    }

    pub(super) fn finish(mut self) -> String {
        if self.format == Format::OpenMetrics {
            self.text.push_str("# EOF\n");
        }
        self.text
    }
}

/// Writes the beginning of a sample: the name, and the labels for which `values` contains a value. Does not write the
/// closing brace.
fn begin(text: &mut String, family: &FamilyInfo, suffix: &str, values: &[&str]) {
    text.push_str(family.name);
    text.push_str(suffix);
    let mut before = '{';
    for (label, value) in family.labels.iter().zip(values) {
        text.push(before);
        text.push_str(label);
        text.push_str("=\"");
        push_escaped(text, value);
        text.push('"');
        before = ',';
    }
}

/// Writes a label value and escapes special characters. Tenant names can contain any character except NUL.
fn push_escaped(text: &mut String, value: &str) {
    if !value.bytes().any(|byte| matches!(byte, b'\\' | b'"' | b'\n')) {
        text.push_str(value);
        return;
    }
    for character in value.chars() {
        match character {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            other => text.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accept_header_selects_metrics_format() {
        let prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                          application/openmetrics-text;version=0.0.1;q=0.5,\
                          text/plain;version=1.0.0;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for accept in [
            prometheus,
            "",
            "*/*",
            "application/json",
            "application/openmetrics-text",
            "text/plain;q=0.4, Application/OpenMetrics-Text; Version=\"1.0.0\"; q=0.5",
            "text/plain;q=0, application/openmetrics-text;q=0.1",
            "text/plain;version=9, */*",
            "text/plain;q=x",
            "application/openmetrics-text;q=NaN,*/*",
            "application/openmetrics-text;q=0,application/openmetrics-text;version=1.0.0",
        ] {
            assert_eq!(Format::from_accept(accept), Format::OpenMetrics, "{accept}");
        }
        for accept in [
            "text/plain",
            "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            "application/openmetrics-text;q=0.4,text/plain;q=0.5",
            "application/openmetrics-text;version=2.0.0,text/plain;q=0.5",
            "application/openmetrics-text;version=1.0.0;q=0,*/*",
            "*/*, application/openmetrics-text; q=0.0",
            "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
        ] {
            assert_eq!(Format::from_accept(accept), Format::Classic, "{accept}");
        }
    }

    #[test]
    fn hostile_label_values_are_escaped() {
        static FAMILY: FamilyInfo =
            FamilyInfo { name: "x", kind: Kind::Counter, labels: &["a", "b"], help: "Help." };
        for format in [Format::OpenMetrics, Format::Classic] {
            let mut page = Page::new(format);
            page.family(&FAMILY);
            page.sample(&["\"} 1\n# EOF\n\\", "ü\r\t"], 7);
            page.samples(&["ü\r\t"], [("\"} 1\n# EOF\n\\", 8)]);
            let text = page.finish();
            assert!(text.contains("x_total{a=\"ü\r\t\",b=\"\\\"} 1\\n# EOF\\n\\\\\"} 8\n"), "{text}");
            assert!(text.contains("x_total{a=\"\\\"} 1\\n# EOF\\n\\\\\",b=\"ü\r\t\"} 7\n"), "{text}");
        }
    }
}
