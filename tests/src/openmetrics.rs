//! A strict parser for the subset of OpenMetrics 1.0 that Bulkhead uses. Rejects everything else.

use std::collections::{BTreeMap, BTreeSet};

/// A metric family with all its samples.
#[derive(Debug)]
pub struct Family {
    /// Name of the family, without a suffix.
    pub name: String,
    /// Type of the family: `counter`, `gauge` or `histogram`.
    pub kind: String,
    /// Samples, in page order.
    pub samples: Vec<Sample>,
}

/// A sample line.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Name of the sample, with the suffix.
    pub name: String,
    /// All labels of the sample.
    pub labels: BTreeMap<String, String>,
    /// Value of the sample.
    pub value: f64,
}

/// A complete metrics page.
#[derive(Debug)]
pub struct Page {
    /// Families, in page order.
    pub families: Vec<Family>,
}

impl Page {
    /// Parses a page of metrics. If the page is invalid, returns an error that describes the first problem.
    pub fn parse(text: &str) -> Result<Self, String> {
        let body = text.strip_suffix("# EOF\n").ok_or("the page does not end with # EOF")?;
        if !body.is_empty() && !body.ends_with('\n') {
            return Err("the line before # EOF has no end".into());
        }
        let mut families: Vec<Family> = Vec::new();
        let mut help = None;
        for line in body.split_terminator('\n') {
            read_line(line, &mut families, &mut help).map_err(|error| format!("{error}: {line}"))?;
        }
        let mut names = BTreeSet::new();
        for family in &families {
            if !names.insert(&family.name) {
                return Err(format!("the family {} is listed twice", family.name));
            }
            check_family(family)?;
        }
        Ok(Self { families })
    }

    /// Returns the family with this name. The name does not include a suffix.
    pub fn family(&self, name: &str) -> &Family {
        let found = self.families.iter().find(|family| family.name == name);
        found.unwrap_or_else(|| panic!("there is no {name}"))
    }

    /// Returns the samples with the given name, including the suffix, and at least the given labels.
    pub fn samples<'p>(
        &'p self,
        name: &'p str,
        labels: &'p [(&str, &str)],
    ) -> impl Iterator<Item = &'p Sample> {
        let fits = move |sample: &&Sample| {
            sample.name == name
                && labels
                    .iter()
                    .all(|(label, value)| sample.labels.get(*label).is_some_and(|own| own == value))
        };
        self.families.iter().flat_map(|family| &family.samples).filter(fits)
    }

    /// Returns the sum of all samples with the given name and at least the given labels.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        self.samples(name, labels).map(|sample| sample.value as u64).sum()
    }

    /// Returns all samples that must never decrease, by name and labels. These are the samples of all families
    /// except gauges.
    pub fn growing(&self) -> BTreeMap<(String, BTreeMap<String, String>), f64> {
        let kinds = self.families.iter().filter(|family| family.kind != "gauge");
        let samples = kinds.flat_map(|family| &family.samples);
        samples.map(|sample| ((sample.name.clone(), sample.labels.clone()), sample.value)).collect()
    }
}

fn read_line(line: &str, families: &mut Vec<Family>, help: &mut Option<String>) -> Result<(), String> {
    if let Some(rest) = line.strip_prefix("# HELP ") {
        let (name, text) = rest.split_once(' ').ok_or("no text")?;
        if text.is_empty() || text.contains(['\\', '"']) || help.replace(name.to_owned()).is_some() {
            return Err("the help text is empty, has an escape or a quote, or is repeated".into());
        }
        return Ok(());
    }
    if let Some(rest) = line.strip_prefix("# TYPE ") {
        let (name, kind) = rest.split_once(' ').ok_or("no type")?;
        if help.take().as_deref() != Some(name) || !is_name(name) {
            return Err("the type does not follow the help text of the same name".into());
        }
        if !["counter", "gauge", "histogram"].contains(&kind) {
            return Err("an unknown type".into());
        }
        families.push(Family { name: name.into(), kind: kind.into(), samples: Vec::new() });
        return Ok(());
    }
    let family = families.last_mut().filter(|_| help.is_none()).ok_or("a sample without a family")?;
    let sample = read_sample(line)?;
    let suffix = sample.name.strip_prefix(family.name.as_str()).ok_or("a sample of another family")?;
    let allowed: &[&str] = match family.kind.as_str() {
        "counter" => &["_total"],
        "gauge" => &[""],
        _ => &["_bucket", "_count", "_sum"],
    };
    if !allowed.contains(&suffix) {
        return Err(format!("a {} has no {suffix}", family.kind));
    }
    family.samples.push(sample);
    Ok(())
}

fn is_name(name: &str) -> bool {
    let mut characters = name.chars();
    characters.next().is_some_and(|first| first.is_ascii_alphabetic() || first == '_')
        && characters.all(|other| other.is_ascii_alphanumeric() || other == '_')
}

fn read_sample(line: &str) -> Result<Sample, String> {
    let end = line.find(['{', ' ']).ok_or("no value")?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = BTreeMap::new();
    if let Some(mut inside) = rest.strip_prefix('{') {
        loop {
            let (label, value) = inside.split_once("=\"").ok_or("a label without a value")?;
            if !is_name(label) {
                return Err(format!("{label:?} is not a label name"));
            }
            let (value, after) = read_quoted(value)?;
            if labels.insert(label.to_owned(), value).is_some() {
                return Err(format!("the label {label} is repeated"));
            }
            match after.strip_prefix(',') {
                Some(more) => inside = more,
                None => {
                    rest = after.strip_prefix('}').ok_or("labels without an end")?;
                    break;
                }
            }
        }
    }
    let number = rest.strip_prefix(' ').ok_or("no value after one space")?;
    let value: f64 = number.parse().map_err(|_| format!("{number:?} is not a number"))?;
    if !is_name(name) || !value.is_finite() {
        return Err("the name is invalid or the value is not finite".into());
    }
    Ok(Sample { name: name.into(), labels, value })
}

/// Parses a quoted value. Returns the value and the rest of the text.
fn read_quoted(text: &str) -> Result<(String, &str), String> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Ok((value, &text[at + 1..])),
            '\\' => value.push(match characters.next() {
                Some((_, '\\')) => '\\',
                Some((_, '"')) => '"',
                Some((_, 'n')) => '\n',
                other => return Err(format!("an unknown escape: {other:?}")),
            }),
            other => value.push(other),
        }
    }
    Err("a value without an end".into())
}

fn check_family(family: &Family) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    for sample in &family.samples {
        if !seen.insert((&sample.name, &sample.labels)) {
            return Err(format!("the sample is repeated: {sample:?}"));
        }
        if family.kind != "gauge" && sample.value < 0.0 {
            return Err(format!("the value is negative: {sample:?}"));
        }
    }
    if family.kind == "histogram" { check_histogram(family) } else { Ok(()) }
}

/// Samples of a histogram that share the same labels.
#[derive(Debug, Default)]
struct Series {
    /// Upper bounds and cumulative counts of the buckets.
    buckets: Vec<(f64, f64)>,
    counts: Vec<f64>,
    sums: Vec<f64>,
}

fn check_histogram(family: &Family) -> Result<(), String> {
    let mut all: BTreeMap<BTreeMap<String, String>, Series> = BTreeMap::new();
    for sample in &family.samples {
        let mut labels = sample.labels.clone();
        let bound = labels.remove("le");
        let series = all.entry(labels).or_default();
        match (&sample.name[family.name.len()..], bound) {
            ("_bucket", Some(bound)) => {
                let bound = if bound == "+Inf" { Ok(f64::INFINITY) } else { bound.parse() };
                series.buckets.push((
                    bound.map_err(|_| format!("the bucket has no valid bound: {sample:?}"))?,
                    sample.value,
                ));
            }
            ("_count", None) => series.counts.push(sample.value),
            ("_sum", None) => series.sums.push(sample.value),
            _ => return Err(format!("not a sample of a histogram: {sample:?}")),
        }
    }
    match all.iter().find(|(_, series)| !series.is_sound()) {
        Some((labels, series)) => Err(format!("{} {labels:?}: {series:?}", family.name)),
        None => Ok(()),
    }
}

impl Series {
    /// Returns true if the buckets are cumulative, ordered and complete.
    fn is_sound(&self) -> bool {
        let Self { buckets, counts, sums } = self;
        let is_ordered = buckets.is_sorted_by(|a, b| a.0 < b.0) && buckets.is_sorted_by(|a, b| a.1 <= b.1);
        let last = buckets.last().copied();
        let is_whole = last.is_some_and(|(bound, count)| bound == f64::INFINITY && *counts == [count]);
        let has_sum = sums.len() == 1 && (*counts != [0.0] || *sums == [0.0]);
        is_ordered && is_whole && has_sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parser_rejects_malformed_pages() {
        let counter = "# HELP a A.\n# TYPE a counter\n";
        for good in ["", "a_total 1\n", "a_total{b=\"\\\\\\\"\\n\"} 1\na_total{b=\"c\",d=\"}\"} 2.5\n"] {
            Page::parse(&format!("{counter}{good}# EOF\n")).unwrap();
        }
        for bad in [
            "a 1\n",
            "a_total 1",
            "a_total  1\n",
            "a_total -1\n",
            "a_total x\n",
            "b_total 1\n",
            "a_total{} 1\n",
            "a_total{b=\"c\"d=\"e\"} 1\n",
            "a_total{b=\"\\t\"} 1\n",
            "a_total{b=\"c\",b=\"c\"} 1\n",
            "a_total 1\na_total 2\n",
            "a_total 1\n\n",
            "# TYPE b gauge\nb 1\n",
            "# EOF\na_total 1\n",
        ] {
            Page::parse(&format!("{counter}{bad}# EOF\n")).unwrap_err();
        }
        let histogram = "# HELP h H.\n# TYPE h histogram\n";
        let good = "h_bucket{le=\"1.0\"} 1\nh_bucket{le=\"+Inf\"} 2\nh_count 2\nh_sum 3\n";
        Page::parse(&format!("{histogram}{good}# EOF\n")).unwrap();
        for (old, new) in
            [("le=\"1.0\"} 1", "le=\"1.0\"} 3"), ("count 2", "count 3"), ("+Inf", "7.0"), ("h_sum 3\n", "")]
        {
            Page::parse(&format!("{histogram}{}# EOF\n", good.replace(old, new))).unwrap_err();
        }
    }
}
