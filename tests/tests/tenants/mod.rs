//! Isolated tenants: separate workers, permits, queues, rate limits and breakers.

mod churn;
mod crowd;
mod isolation;
mod limits;
mod recovery;
