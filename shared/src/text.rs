//! Escapes text from workers and clients, so that the text cannot control a terminal or imitate other output. The
//! commands, the log and the events escape text before they write it. This module does not shorten text, which `limits`
//! does.

/// Returns true for characters that a terminal could interpret as a command, that reorder text, or that are invisible:
/// control characters (including line feed and tab), format characters, and line and paragraph separators.
pub fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e007f}')
}

/// Escapes text as in `\u{202e}`. All characters for which [`is_unprintable`] is true are escaped, except line feed and
/// tab.
pub fn escape(text: &str) -> String {
    let escaped = |c: char| {
        if is_unprintable(c) && !matches!(c, '\n' | '\t') { c.escape_default().to_string() } else { c.into() }
    };
    text.chars().map(escaped).collect()
}

/// Escapes, in a line of JSON, all characters for which [`is_unprintable`] is true. Such characters occur only in
/// strings, so the meaning of the JSON does not change.
pub fn escape_json(json: &str) -> String {
    if !json.contains(is_unprintable) {
        return json.to_owned();
    }
    let units = |c: char| c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect();
    json.chars().map(|c| if is_unprintable(c) { units(c) } else { String::from(c) }).collect()
}

/// Makes `Debug` produce the same output as `Display` for error types. Rust prints an error returned from `main` with
/// `Debug`.
#[macro_export]
macro_rules! debug_by_display {
    ($($type:ty),+) => {$(
        impl ::std::fmt::Debug for $type {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                ::std::fmt::Display::fmt(self, f)
            }
        }
    )+};
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_and_format_characters_are_escaped() {
        let controls = ('\0'..=char::MAX).filter(|c| c.is_control() && !matches!(c, '\n' | '\t'));
        for c in
            controls.chain("\u{202e}\u{2066}\u{200b}\u{200f}\u{61c}\u{2028}\u{feff}\u{ad}\u{e0041}".chars())
        {
            assert_eq!(escape(&format!("a{c}b")), format!("a{}b", c.escape_default()));
            let json = escape_json(&format!("\"a{c}b\""));
            assert!(!json.contains(is_unprintable), "{json}");
        }
        assert_eq!(escape("naïve 東京\u{3000}\t\n"), "naïve 東京\u{3000}\t\n");
        assert_eq!(escape_json("\"\u{9b}\u{e0041}\""), "\"\\u009b\\udb40\\udc41\"");
    }
}
