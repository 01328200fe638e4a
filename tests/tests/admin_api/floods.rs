//! Tests that floods of requests on the admin socket delay neither jobs nor the shutdown.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bulkhead_client::blocking::Client;
use bulkhead_tests::tenants::{assert_balanced, isolated};
use bulkhead_tests::{PATIENCE, Supervisor, heavy, outcome, wait_for};
use nix::sys::signal::Signal;

/// Number of tenants. Must be less than 4096, the maximum number that a supervisor remembers per bulkhead.
const TENANTS: usize = 4000;

const HONEST: &str = "[bulkhead.honest]\ncommand = [\"MISBEHAVE\"]\n";

/// Starts a supervisor that remembers [`TENANTS`] tenants. All jobs of these tenants have been rejected.
fn crowded() -> (Supervisor, Client) {
    let keys = "max_in_flight = 1\ndeadline_max = \"600s\"";
    let bulkheads = format!("{}{HONEST}", isolated("max_active = 1", keys));
    let supervisor = Supervisor::start(&bulkheads);
    let client = Client::connect(supervisor.socket()).unwrap();
    // No other tenant gets workers as long as this job runs.
    let busy = client.job("b", "").operation("hang").tenant("busy").deadline(5 * PATIENCE).start().unwrap();
    supervisor.wait_number("b", "in_flight", 1);
    for tenant in 0..TENANTS {
        let refused = client.job("b", "").tenant(format!("t{tenant}")).send();
        assert_eq!(outcome(&refused), "rejected/unavailable");
    }
    std::mem::forget(busy);
    (supervisor, client)
}

/// Requests all `pages` repeatedly while `meanwhile` runs. Returns the number of responses.
fn besieged(supervisor: &Supervisor, pages: &[&str], meanwhile: impl FnOnce()) -> u64 {
    let (is_over, answers) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for page in pages {
            let (is_over, answers) = (&is_over, &answers);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    answers.fetch_add(u64::from(supervisor.try_get(page).is_some()), Ordering::Relaxed);
                }
            });
        }
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            wait_for("a request is answered", || (answers.load(Ordering::Relaxed) > 0).then_some(()));
            meanwhile();
        }));
        // Ends the other threads even after a panic. Otherwise, the scope would wait for them forever.
        is_over.store(true, Ordering::Relaxed);
        if let Err(panic) = done {
            std::panic::resume_unwind(panic);
        }
    });
    answers.into_inner()
}

/// Requests for admin pages that describe thousands of tenants must not block jobs.
#[test]
fn large_admin_responses_do_not_block_jobs() {
    let _turn = heavy();
    let (supervisor, client) = crowded();
    let pages = ["/v1/bulkheads", "/v1/bulkheads/b", "/readyz", "/metrics"].repeat(4);
    let mut jobs = 0;
    let answers = besieged(&supervisor, &pages, || {
        for _ in 0..100 {
            assert_eq!(outcome(&client.job("honest", "").deadline(PATIENCE).send()), "ok");
            jobs += 1;
        }
    });
    // Requests delay a job only slightly, because each iteration of the event loop builds one part of a large response.
    assert!(jobs == 100 && answers > 0);
    let snapshot = supervisor.snapshot("b");
    assert_balanced(&snapshot);
    assert_eq!(snapshot["rejected"]["unavailable"], TENANTS);
    assert_eq!(supervisor.try_get("/readyz").unwrap().0, 200);
}

/// A tenant that the supervisor forgets while it builds the snapshot must be counted exactly once.
#[test]
fn snapshot_counts_forgotten_tenants_exactly_once() {
    let _turn = heavy();
    let (supervisor, client) = crowded();
    let submitted = TENANTS + 1;
    besieged(&supervisor, &["/v1/bulkheads"; 2], || {
        let mut least = 0;
        for round in 0..20 {
            for tenant in 0..50 {
                let refused = client.job("b", "").tenant(format!("u{round}-{tenant}")).send();
                assert_eq!(outcome(&refused), "rejected/unavailable");
            }
            let snapshot = supervisor.snapshot("b");
            assert_balanced(&snapshot);
            let now = snapshot["submitted"].as_u64().unwrap();
            assert!(now >= least, "{now} after {least}");
            least = now;
        }
    });
    assert_eq!(supervisor.number("b", "submitted") as usize, submitted + 20 * 50);
}

#[test]
fn many_pending_commands_do_not_delay_shutdown() {
    let _turn = heavy();
    let (mut supervisor, _client) = crowded();
    // While the supervisor is stopped, more commands arrive than one iteration handles. No client waits for a response.
    supervisor.signal(Signal::SIGSTOP);
    let admin = supervisor.folder.path().join("admin.sock");
    let ask = || {
        let mut socket = UnixStream::connect(&admin).ok()?;
        socket.write_all(b"GET /v1/bulkheads HTTP/1.1\r\nHost: x\r\n\r\n").ok()
    };
    let asked = (0..100).filter_map(|_| ask()).count();
    assert!(asked > 0);
    // The second signal ends the drain. Otherwise, the drain would wait for the running job.
    supervisor.signal(Signal::SIGTERM);
    supervisor.signal(Signal::SIGINT);
    supervisor.signal(Signal::SIGCONT);
    assert!(supervisor.wait().success());
}
