//! `GET /metrics`: asks the data plane for its numbers, and formats them on this thread.

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};

use super::Shared;
use super::answers::stuck;
use crate::observe::metrics::{self, Format};
use bulkhead_plane::command::Command;

pub(super) async fn show(State(control): State<Shared>, headers: HeaderMap) -> Response {
    let Some(scrape) = control.commander.ask(|reply| Command::Scrape { reply }).await else { return stuck() };
    let accepted: Vec<&str> =
        headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
    let format = Format::asked(&accepted.join(","));
    let page = metrics::render(&scrape, control.reloads.counts(), &control.residents, format);
    let headers = [(header::CONTENT_TYPE, format.content_type()), (header::VARY, "Accept")];
    (headers, page).into_response()
}
