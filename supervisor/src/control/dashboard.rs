//! The dashboard on `GET /`: a page and the files that it is made of, all built in. It asks this API and nobody
//! else, and may do no more than that: everything it is given to show is hostile.

use axum::extract::Path;
use axum::http::{HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::http::problem;

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const PICTURE: &str = "image/svg+xml";

/// What browsers let the page do: scripts and styles from its own files alone, requests to its own origin alone,
/// nothing that turns text into markup, and no place in other people's pages.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
    trusted-types 'none'";

const GUARDS: [(HeaderName, &str); 6] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    // After an upgrade the page is that of the new version.
    (header::CACHE_CONTROL, "no-cache"),
];

macro_rules! files {
    ($($name:literal as $kind:ident),* $(,)?) => {
        &[$(($name, $kind, include_str!(concat!("dashboard/", $name)))),*]
    };
}

/// Name, type and text.
const FILES: &[(&str, &str, &str)] = files![
    "icon.svg" as PICTURE,
    "style.css" as STYLE,
    "panels.css" as STYLE,
    "main.js" as SCRIPT,
    "actions.js" as SCRIPT,
    "api.js" as SCRIPT,
    "cards.js" as SCRIPT,
    "crashes.js" as SCRIPT,
    "details.js" as SCRIPT,
    "dom.js" as SCRIPT,
    "feed.js" as SCRIPT,
    "format.js" as SCRIPT,
    "heatmap.js" as SCRIPT,
    "history.js" as SCRIPT,
    "keys.js" as SCRIPT,
    "stream.js" as SCRIPT,
];

pub(super) async fn page() -> Response {
    (GUARDS, [(header::CONTENT_TYPE, HTML)], include_str!("dashboard/index.html")).into_response()
}

pub(super) async fn file(Path(name): Path<String>) -> Response {
    match FILES.iter().find(|(own, ..)| *own == name) {
        Some((_, kind, text)) => (GUARDS, [(header::CONTENT_TYPE, *kind)], *text).into_response(),
        None => problem(StatusCode::NOT_FOUND, "the dashboard has no such file"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The page loads what is here and nothing from elsewhere, and no text becomes markup.
    #[test]
    fn the_page_is_made_of_its_own_files() {
        let page = include_str!("dashboard/index.html");
        let texts = FILES.iter().map(|(name, _, text)| (*name, *text)).chain([("index.html", page)]);
        for (name, text) in texts {
            let said = text.replace("http://www.w3.org/2000/svg", "");
            for word in ["http:", "https:", "//cdn", "@import", "innerHTML", "outerHTML", "insertAdjacent"] {
                assert!(!said.contains(word), "{name} has {word}");
            }
            for (_, rest) in
                text.match_indices("/dashboard/").map(|(at, found)| text.split_at(at + found.len()))
            {
                let end = rest.find(['"', '\'', '`']).unwrap_or(rest.len());
                assert!(
                    FILES.iter().any(|(own, ..)| *own == &rest[..end]),
                    "{name} asks for {}",
                    &rest[..end]
                );
            }
            for (_, rest) in text.match_indices("from './").map(|(at, found)| text.split_at(at + found.len()))
            {
                let end = rest.find('\'').unwrap_or(rest.len());
                assert!(
                    FILES.iter().any(|(own, ..)| *own == &rest[..end]),
                    "{name} imports {}",
                    &rest[..end]
                );
            }
        }
    }
}
