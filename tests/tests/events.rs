//! Events stay readable, and are kept for those who come later, while one bulkhead is in trouble.

use std::time::Instant;

use bulkhead_client::blocking::Client;
use bulkhead_tests::{Supervisor, outcome, wait_for};

/// Programs that die as fast as they can be started.
const CRASHES: u64 = 800;
const CALLERS: u64 = 8;

/// What `observe/events.rs` lets through at once, and a second.
const BURST: u64 = 512;
const PER_SECOND: u64 = 10;

#[test]
fn a_storm_of_events_is_told_in_part_and_counted_in_full() {
    let supervisor = Supervisor::start(
        "[bulkhead.storm]\nexec = [\"sh\", \"-c\", \"kill -9 $$\"]\nmax_in_flight = 8\ndeadline = \"60s\"\n\
         [bulkhead.quiet]\nexec = [\"cat\"]\n",
    );
    supervisor.wait_number("storm", "limit", 8);
    supervisor.resize("quiet", r#"{"max_queue": 7}"#);
    let began = Instant::now();
    let client = Client::connect(supervisor.socket()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..CALLERS {
            scope.spawn(|| {
                for _ in 0..CRASHES / CALLERS {
                    assert_eq!(outcome(&client.job("storm", "").send()), "crashed/signal");
                }
            });
        }
    });
    assert_eq!(supervisor.number("storm", "crashed"), CRASHES);
    let told = wait_for("all are told or counted", || {
        let told = supervisor.events("job_crashed");
        let mut rest = supervisor.events("events_suppressed");
        rest.retain(|event| event["of"] == "job_crashed" && event["bulkhead"] == "storm");
        let suppressed = told.iter().chain(&rest).filter_map(|event| event["suppressed"].as_u64());
        (told.len() as u64 + suppressed.sum::<u64>() == CRASHES).then_some(told.len() as u64)
    });
    // At least a second has begun for each that has passed.
    let seconds = began.elapsed().as_secs() + 2;
    assert!(told <= BURST + PER_SECOND * seconds, "{told} in {seconds} s");
    let changed = supervisor.events("limits_changed");
    assert_eq!((changed.len(), &changed[0]["bulkhead"]), (1, &"quiet".into()), "{changed:?}");
}
