//! Handler for `GET /`, which serves the dashboard. The dashboard is a single page without external resources, and uses
//! only the admin API. A content security policy enforces this, because all displayed data is untrusted.

use std::sync::LazyLock;

use axum::http::{HeaderName, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest as _, Sha256};

macro_rules! file {
    ($name:literal) => {
        include_str!(concat!("dashboard/", $name))
    };
}

/// JavaScript modules of the dashboard, in dependency order. They are concatenated into one script, so no two modules
/// can define the same name. A test checks this.
const MODULES: [&str; 14] = [
    file!("format.js"),
    file!("worst.js"),
    file!("dom.js"),
    file!("history.js"),
    file!("api.js"),
    file!("stream.js"),
    file!("keys.js"),
    file!("actions.js"),
    file!("feed.js"),
    file!("crashes.js"),
    file!("heatmap.js"),
    file!("cards.js"),
    file!("details.js"),
    file!("main.js"),
];

const STYLES: [&str; 2] = [file!("style.css"), file!("panels.css")];

static PAGE: LazyLock<Page> = LazyLock::new(Page::new);

struct Page {
    html: String,
    policy: String,
}

impl Page {
    fn new() -> Self {
        let (script, style) = (script(), STYLES.concat());
        let icon = format!("data:image/svg+xml;base64,{}", STANDARD.encode(file!("icon.svg")));
        let html = file!("index.html")
            .replace("{icon}", &icon)
            .replace("{style}", &style)
            .replace("{script}", &script);
        // The content security policy allows only this script, this style, and requests to the origin of the
        // page. It forbids converting text to markup and embedding the page in other pages.
        let policy = format!(
            "default-src 'none'; script-src {}; style-src {}; img-src data:; connect-src 'self'; base-uri 'none'; \
             form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
            source(&script),
            source(&style)
        );
        Self { html, policy }
    }
}

/// Concatenates all modules. Removes the imports, because the imported names are defined earlier in the
/// script.
fn script() -> String {
    let lines = MODULES.iter().flat_map(|module| module.lines());
    let own = lines.filter(|line| !line.starts_with("import "));
    own.flat_map(|line| [line.strip_prefix("export ").unwrap_or(line), "\n"]).collect()
}

/// Returns the source expression that allows an inline script or style in a content security policy.
fn source(text: &str) -> String {
    format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text)))
}

pub(super) async fn page() -> Response {
    let headers: [(HeaderName, &str); 7] = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, &PAGE.policy),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        // Browsers must load the new version of the page after an upgrade of the supervisor.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, PAGE.html.as_str()).into_response()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn dashboard_page_is_self_contained() {
        let page = PAGE.html.replace("http://www.w3.org/2000/svg", "");
        for word in
            ["http:", "https:", "//cdn", "@import", "innerHTML", "outerHTML", "insertAdjacent", "src=\"/"]
        {
            assert!(!page.contains(word), "{word}");
        }
        assert!(!page.contains("{icon}") && !page.contains("{style}") && !page.contains("{script}"));
        // A closing tag inside the script or style would close the HTML element too early.
        assert_eq!((page.matches("</script").count(), page.matches("</style").count()), (1, 1));
        for line in script().lines() {
            assert!(!line.starts_with("import") && !line.starts_with("export"), "{line}");
        }
    }

    /// Checks that no two modules define the same name, because all modules share one scope after concatenation. Also
    /// checks that modules import only from earlier modules.
    #[test]
    fn dashboard_modules_have_unique_names() {
        let mut names = BTreeSet::new();
        let mut exported = BTreeSet::new();
        for module in MODULES {
            for line in module.lines() {
                if let Some((imported, _)) =
                    line.strip_prefix("import {").and_then(|rest| rest.split_once('}'))
                {
                    for name in imported.split(',').map(str::trim) {
                        assert!(exported.contains(name), "{name} is imported before its definition");
                    }
                }
                let bare = line.strip_prefix("export ").unwrap_or(line);
                let bare = bare.strip_prefix("async ").unwrap_or(bare);
                let kinds = ["const ", "let ", "class ", "function "];
                let Some(rest) = kinds.iter().find_map(|kind| bare.strip_prefix(kind)) else { continue };
                let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
                assert!(names.insert(name), "{name} is defined twice");
                if line.starts_with("export ") {
                    exported.insert(name);
                }
            }
        }
    }
}
