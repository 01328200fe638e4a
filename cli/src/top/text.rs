//! Sanitizes, measures and pads text for the screens of `top`. Each text becomes a single line without control
//! characters, with a width that all terminals agree on. Also abbreviates numbers and draws bars. `columns`, `detail`
//! and `draw` decide which values to show.

use unicode_segmentation::UnicodeSegmentation;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::output::escape;

/// Maximum number of characters to display per string.
const TEXT_CHARS_MAX: usize = 2000;

/// Maximum number of characters in a grapheme cluster.
const CLUSTER_CHARS_MAX: usize = 8;

/// Formats external text as one line that cannot control the terminal or shift the text next to it.
pub(super) fn clean(text: &str) -> String {
    let kept: String = text.chars().take(TEXT_CHARS_MAX).collect();
    let line = escape(&kept).replace(['\n', '\t'], " ");
    line.graphemes(true).filter_map(stable_width_part).collect()
}

/// Returns the whole grapheme cluster if terminals agree on the cluster's width, and otherwise only the first
/// character. Returns `None` if the text has no width.
fn stable_width_part(cluster: &str) -> Option<&str> {
    let first = cluster.chars().next()?;
    let of_all: usize = cluster.chars().filter_map(UnicodeWidthChar::width).sum();
    let is_agreed = of_all == cluster.width() && cluster.chars().count() <= CLUSTER_CHARS_MAX;
    let shown = if is_agreed { cluster } else { &cluster[..first.len_utf8()] };
    (shown.width() > 0).then_some(shown)
}

/// Returns the width of sanitized text in screen columns.
pub(super) fn width(text: &str) -> usize {
    text.graphemes(true).map(UnicodeWidthStr::width).sum()
}

/// Pads or truncates sanitized text to exactly `columns` screen columns. Truncated text ends with `…`.
pub(super) fn fit(text: &str, columns: usize) -> String {
    let mut fitted = cut(text, columns);
    fitted.extend(std::iter::repeat_n(' ', columns.saturating_sub(width(&fitted))));
    fitted
}

/// Like [`fit`], but aligns the text to the right.
pub(super) fn fit_right(text: &str, columns: usize) -> String {
    let cut = cut(text, columns);
    let mut fitted = " ".repeat(columns.saturating_sub(width(&cut)));
    fitted.push_str(&cut);
    fitted
}

fn cut(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    let mut left = columns.saturating_sub(1);
    let mut kept = String::new();
    for cluster in text.graphemes(true) {
        let taken = cluster.width();
        if taken > left {
            break;
        }
        left -= taken;
        kept.push_str(cluster);
    }
    if columns > 0 {
        kept.push('…');
    }
    kept
}

/// Suffixes for abbreviated numbers.
const UNITS: [(u64, char); 6] = [
    (1_000_000_000_000_000_000, 'E'),
    (1_000_000_000_000_000, 'P'),
    (1_000_000_000_000, 'T'),
    (1_000_000_000, 'G'),
    (1_000_000, 'M'),
    (1_000, 'k'),
];

/// Formats a number using at most four characters.
pub(super) fn short(number: u64) -> String {
    let unit = UNITS.iter().find(|(unit, _)| number >= 10_000 && number >= *unit);
    let Some(&(unit, letter)) = unit else { return number.to_string() };
    let (whole, tenth) = (number / unit, number % unit / (unit / 10));
    if whole < 10 { format!("{whole}.{tenth}{letter}") } else { format!("{whole}{letter}") }
}

/// Formats a rate using at most four characters.
pub(super) fn rate(per_second: f64) -> String {
    match per_second {
        none if none <= 0.0 => "0".to_owned(),
        little if little < 0.1 => "<0.1".to_owned(),
        some if some < 9.95 => format!("{some:.1}"),
        // The cast saturates.
        many => short(many.round() as u64),
    }
}

/// Formats a fraction as a bar with a resolution of one eighth of a screen column.
pub(super) fn bar(share: f64, columns: usize) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let all = columns * 8;
    let filled = (share.clamp(0.0, 1.0) * all as f64).round() as usize;
    // A nonzero fraction always shows at least one eighth.
    let filled = if share > 0.0 { filled.max(1).min(all) } else { 0 };
    fit(&format!("{}{}", "█".repeat(filled / 8), EIGHTHS[filled % 8]), columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fitted_text_has_requested_width() {
        let zalgo = format!("a{}", "\u{301}".repeat(500));
        let family = "👨\u{200d}👩\u{200d}👧 ❤\u{fe0f} 🇩🇪";
        for text in
            ["", "thumbnail", "東京都", "e\u{301}tude", "กำลัง", "\u{200b}\u{feff}x", &zalgo, family, "가"]
        {
            let text = clean(text);
            for columns in 0..20 {
                for fitted in [fit(&text, columns), fit_right(&text, columns)] {
                    assert_eq!(width(&fitted), columns, "{fitted:?}");
                    let by_char: usize = fitted.chars().filter_map(UnicodeWidthChar::width).sum();
                    assert_eq!(by_char, columns, "the sum of the character widths differs: {fitted:?}");
                }
            }
        }
        assert_eq!(fit("thumbnail-safe", 10), "thumbnail…");
        assert_eq!(fit("東京都", 4), "東… ");
        assert_eq!(fit_right("7", 3), "  7");
        assert_eq!(clean(&zalgo), "a");
        assert_eq!(clean("e\u{301}tude"), "e\u{301}tude");
    }

    #[test]
    fn clean_text_contains_no_control_characters() {
        let hostile = "\u{1b}[2J\r\n\t\u{9b}31m\u{202e}\u{2066}\0\u{7f}\u{2028}x";
        let actual = clean(hostile);
        assert!(!actual.contains(char::is_control), "{actual:?}");
        assert!(actual.is_ascii() && actual.ends_with('x'), "{actual:?}");
        assert_eq!(clean(&"x".repeat(1 << 20)).len(), TEXT_CHARS_MAX);
    }

    #[test]
    fn short_numbers_take_at_most_four_characters() {
        for (number, expected) in [
            (0, "0"),
            (9_999, "9999"),
            (10_000, "10k"),
            (999_999, "999k"),
            (1_000_000, "1.0M"),
            (12_345_678, "12M"),
            (1_950_000_000, "1.9G"),
            (u64::MAX, "18E"),
        ] {
            assert_eq!(short(number), expected);
        }
        for (per_second, expected) in [
            (0.0, "0"),
            (0.01, "<0.1"),
            (0.25, "0.2"),
            (9.94, "9.9"),
            (9.96, "10"),
            (12_345.0, "12k"),
            (1e300, "18E"),
        ] {
            assert_eq!(rate(per_second), expected);
        }
    }

    #[test]
    fn bar_length_is_proportional_to_value() {
        assert_eq!(bar(0.0, 4), "    ");
        assert_eq!(bar(0.5, 4), "██  ");
        assert_eq!(bar(0.001, 4), "▏   ");
        assert_eq!(bar(0.59, 4), "██▍ ");
        assert_eq!(bar(7.0, 4), "████");
        assert_eq!(bar(f64::NAN, 4), "    ");
        assert_eq!(bar(1.0, 0), "");
    }
}
