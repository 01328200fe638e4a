//! Handles `GET /metrics` on the low-priority reader thread. Requests the counters from the data plane, and returns the
//! page that `observe::metrics` renders.

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};

use super::Shared;
use super::responses::stuck;
use crate::observe::metrics::{self, Format};
use bulkhead_plane::command::Command;

pub(super) async fn show(State(control): State<Shared>, headers: HeaderMap) -> Response {
    let Some(scrape) = control.commands.request(|reply| Command::Scrape { reply }).await else {
        return stuck();
    };
    let accepted: Vec<&str> =
        headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
    let format = Format::from_accept(&accepted.join(","));
    let (jobs_http, reloads) = (control.jobs_http.read(), control.reloads.counts());
    let page = metrics::render(&scrape, jobs_http, reloads, &control.resident_sizes, format);
    let headers = [(header::CONTENT_TYPE, format.content_type()), (header::VARY, "Accept")];
    (headers, page).into_response()
}
