//! Tests of individual rules. They are in one program, because each additional program takes seconds to compile and
//! link.

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
