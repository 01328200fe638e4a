//! Tests of single rules, in one program because each further program takes seconds to compile and link.

#![expect(clippy::panic, reason = "a test reports failures by panicking")]

mod adaptive;
mod anchors;
mod cases;
mod deaths;
mod fixture;
mod prefetch;
mod reload;
mod replacement;
mod spares;
mod withheld;
