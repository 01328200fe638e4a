//! The admin API: sockets, HTTP, jobs over HTTP, the dashboard, and hostile callers.

mod admin;
mod dashboard;
mod floods;
mod http_jobs;
mod jobs_http;
mod load_balancer;
mod openapi;
mod tcp;
mod tour;
mod watch;
