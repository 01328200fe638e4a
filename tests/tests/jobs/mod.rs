//! Jobs from submission to outcome: admission, limits, fallbacks, prefetching, and live changes.

mod adaptive;
mod admission;
mod fallback;
mod ledger;
mod lookahead;
mod outcomes;
mod reload;
mod resizing;
mod run_limits;
