//! The two text formats: OpenMetrics 1.0, and the one that was before it (0.0.4).

use std::fmt::{Display, Write as _};

use super::families::{Family, Kind};

/// How metrics are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// `text/plain; version=0.0.4`.
    Classic,
}

impl Format {
    pub(crate) const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Classic => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// What a scraper's `Accept` asks for: the one of greater weight, of equals the first. Whoever asks for
    /// neither gets OpenMetrics.
    pub(crate) fn asked(accept: &str) -> Self {
        let mut best = None;
        for range in accept.split(',') {
            let Some((format, weight)) = Self::of_range(range) else { continue };
            if weight > 0.0 && best.is_none_or(|(_, most)| weight > most) {
                best = Some((format, weight));
            }
        }
        best.map_or(Self::OpenMetrics, |(format, _)| format)
    }

    /// One media range with its parameters; `None` if it is for neither format.
    fn of_range(range: &str) -> Option<(Self, f64)> {
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

/// Room for a page of a few bulkheads; one that is larger grows.
const PAGE_BYTES: usize = 256 * 1024;

/// A page that is being written.
pub(super) struct Page {
    format: Format,
    text: String,
    family: Option<&'static Family>,
    #[cfg(test)]
    pub(super) families: Vec<&'static str>,
}

impl Page {
    pub(super) fn new(format: Format) -> Self {
        Self {
            format,
            text: String::with_capacity(PAGE_BYTES),
            family: None,
            #[cfg(test)]
            families: Vec::new(),
        }
    }

    /// Begins a family: the samples that follow are its own.
    pub(super) fn family(&mut self, family: &'static Family) {
        #[cfg(test)]
        self.families.push(family.name);
        let suffix = match (self.format, family.kind) {
            (Format::Classic, Kind::Counter) => "_total",
            _ => "",
        };
        let Family { name, kind, help, .. } = family;
        self.write(format_args!("# HELP {name}{suffix} {help}\n"));
        self.write(format_args!("# TYPE {name}{suffix} {}\n", kind.name()));
        self.family = Some(family);
    }

    /// A sample of a counter or a gauge.
    pub(super) fn sample(&mut self, values: &[&str], number: impl Display) {
        let suffix = match self.family {
            Some(Family { kind: Kind::Counter, .. }) => "_total",
            _ => "",
        };
        self.line(suffix, values, None, number);
    }

    /// One line of the present family.
    pub(super) fn line(&mut self, suffix: &str, values: &[&str], bound: Option<&str>, number: impl Display) {
        let Some(Family { name, labels, .. }) = self.family else { return };
        debug_assert_eq!(labels.len(), values.len(), "{name}");
        // There are thousands of these lines: they are put together without a look at a format.
        self.text.push_str(name);
        self.text.push_str(suffix);
        let own = labels.iter().copied().zip(values.iter().copied());
        let mut before = '{';
        for (label, value) in own.chain(bound.map(|bound| ("le", bound))) {
            self.text.push(before);
            self.text.push_str(label);
            self.text.push_str("=\"");
            self.escaped(value);
            self.text.push('"');
            before = ',';
        }
        if before == ',' {
            self.text.push('}');
        }
        self.text.push(' ');
        self.write(format_args!("{number}"));
        self.text.push('\n');
    }

    /// Clients choose the names of tenants: anything but NUL can be in them.
    fn escaped(&mut self, value: &str) {
        if !value.bytes().any(|byte| matches!(byte, b'\\' | b'"' | b'\n')) {
            self.text.push_str(value);
            return;
        }
        for character in value.chars() {
            match character {
                '\\' => self.text.push_str("\\\\"),
                '"' => self.text.push_str("\\\""),
                '\n' => self.text.push_str("\\n"),
                other => self.text.push(other),
            }
        }
    }

    fn write(&mut self, text: std::fmt::Arguments<'_>) {
        // Writing into a string does not fail.
        let _ = self.text.write_fmt(text);
    }

    pub(super) fn finish(mut self) -> String {
        if self.format == Format::OpenMetrics {
            self.text.push_str("# EOF\n");
        }
        self.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scraper_decides() {
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
        ] {
            assert_eq!(Format::asked(accept), Format::OpenMetrics, "{accept}");
        }
        for accept in [
            "text/plain",
            "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            "application/openmetrics-text;q=0.4,text/plain;q=0.5",
            "application/openmetrics-text;version=2.0.0,text/plain;q=0.5",
            "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
        ] {
            assert_eq!(Format::asked(accept), Format::Classic, "{accept}");
        }
    }

    #[test]
    fn hostile_values_stay_values() {
        const FAMILY: Family = Family { name: "x", kind: Kind::Counter, labels: &["a", "b"], help: "Help." };
        for format in [Format::OpenMetrics, Format::Classic] {
            let mut page = Page::new(format);
            page.family(&FAMILY);
            page.sample(&["\"} 1\n# EOF\n\\", "ü\r\t"], 7);
            let text = page.finish();
            assert!(text.contains("x_total{a=\"\\\"} 1\\n# EOF\\n\\\\\",b=\"ü\r\t\"} 7\n"), "{text}");
        }
    }
}
