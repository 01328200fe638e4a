//! Injects faults into the supervisor and its workers during a run.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use bulkhead_api::Snapshot;
use bulkhead_shared::client_protocol::{Hello, Submit, role};
use bulkhead_shared::codec;
use bulkhead_shared::frame::{Header, MAGIC, kind};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::worker::now_us;
use super::{BULKHEADS, Plan, config};
use crate::{Supervisor, kill_pid, request, write_config};

/// A small random number generator (SplitMix64). The same seed always produces the same sequence.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a random number generator with this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a random number that is less than `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// Start time and name of an injected fault. The time is CLOCK_MONOTONIC, in µs.
pub type Deed = (u64, &'static str);

/// Injects faults into a supervisor until the test run is over.
pub struct Chaos {
    threads: Vec<JoinHandle<Vec<Deed>>>,
    is_over: Arc<AtomicBool>,
}

impl Chaos {
    /// Starts threads that inject faults into the supervisor. The threads stop soon after `is_over` is set.
    pub fn begin(supervisor: &Supervisor, notes: &Path, plan: Plan, is_over: Arc<AtomicBool>) -> Self {
        let own_flag = is_over.clone();
        let target = Target {
            pid: supervisor.pid(),
            folder: supervisor.folder.path().to_owned(),
            notes: notes.to_owned(),
            plan,
            is_over,
        };
        let (disturbed, flooded) = (target.clone(), target);
        let threads = vec![
            std::thread::spawn(move || disturbed.disturb(Random::new(plan.seed))),
            std::thread::spawn(move || flooded.flood(Random::new(!plan.seed))),
        ];
        Self { threads, is_over: own_flag }
    }

    /// Stops injecting faults. Returns all faults that were injected.
    pub fn end(mut self) -> Vec<Deed> {
        self.is_over.store(true, Ordering::SeqCst);
        let threads = std::mem::take(&mut self.threads);
        threads.into_iter().flat_map(|thread| thread.join().expect("chaos does not panic")).collect()
    }
}

/// Stops injecting faults if the run panics. Otherwise, later signals could hit unrelated processes that reuse the
/// PID of the supervisor or of a worker.
impl Drop for Chaos {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}

#[derive(Clone)]
struct Target {
    pid: u32,
    folder: PathBuf,
    notes: PathBuf,
    plan: Plan,
    is_over: Arc<AtomicBool>,
}

impl Target {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    fn ask(&self, method: &str, path: &str) -> Option<Value> {
        let (_, body) = request(&self.folder.join("admin.sock"), method, path, "")?;
        serde_json::from_str(&body).ok()
    }

    fn worker(&self, random: &mut Random) -> Option<u32> {
        let bulkhead = BULKHEADS[random.below(BULKHEADS.len())].name;
        let snapshot = self.ask("GET", &format!("/v1/bulkheads/{bulkhead}"))?;
        let workers = serde_json::from_value::<Snapshot>(snapshot).ok()?.workers;
        let worker = (!workers.is_empty()).then(|| &workers[random.below(workers.len())])?;
        worker.pid.filter(|pid| *pid > 1)
    }

    /// Sends signals, restarts bulkheads, and reloads the configuration.
    fn disturb(&self, mut random: Random) -> Vec<Deed> {
        let mut done = Vec::new();
        let mut revision = 0;
        while !self.is_over() {
            let at_us = now_us();
            done.push((at_us, self.deed(&mut random, &mut revision)));
            pause(random.below(150));
        }
        done
    }

    fn deed(&self, random: &mut Random, revision: &mut u64) -> &'static str {
        match random.below(100) {
            0..60 => self.signal(random, Signal::SIGKILL, "worker killed"),
            60..68 => self.signal(random, Signal::SIGTERM, "SIGTERM to a worker"),
            68..78 if self.plan.has_hangs => {
                let Some(pid) = self.worker(random) else { return "no worker" };
                kill_pid(pid, Signal::SIGSTOP);
                pause(random.below(1_500));
                kill_pid(pid, Signal::SIGCONT);
                "worker stopped and continued"
            }
            78..84 => {
                let bulkhead = BULKHEADS[random.below(BULKHEADS.len())].name;
                self.ask("POST", &format!("/v1/bulkheads/{bulkhead}/restart"));
                "bulkhead restarted"
            }
            84..90 => {
                *revision += 1;
                write_config(
                    &self.folder,
                    "drain_timeout = \"20s\"",
                    &config(&self.notes, *revision, self.plan),
                );
                kill_pid(self.pid, Signal::SIGHUP);
                "configuration reloaded"
            }
            90..94 => {
                kill_pid(self.pid, Signal::SIGSTOP);
                pause(random.below(300));
                kill_pid(self.pid, Signal::SIGCONT);
                "supervisor stopped and continued"
            }
            94..95 => {
                let keeper = crate::children(self.pid)
                    .into_iter()
                    .find(|&pid| crate::name(pid).is_some_and(|name| name == "bulkhead-keeper"));
                let Some(keeper) = keeper else { return "no keeper" };
                kill_pid(keeper, Signal::SIGKILL);
                "keeper killed"
            }
            _ => {
                self.ask("GET", "/v1/bulkheads");
                let _ = request(&self.folder.join("admin.sock"), "GET", "/metrics", "");
                "admin API requested"
            }
        }
    }

    fn signal(&self, random: &mut Random, signal: Signal, name: &'static str) -> &'static str {
        match self.worker(random) {
            Some(pid) => {
                kill_pid(pid, signal);
                name
            }
            None => "no worker",
        }
    }

    /// Sends bursts of invalid frames and invalid jobs over short-lived connections.
    fn flood(&self, mut random: Random) -> Vec<Deed> {
        let mut done = Vec::new();
        while !self.is_over() {
            let at_us = now_us();
            let burst = match random.below(3) {
                0 => self.burst("a flood of jobs whose bulkhead is missing", |socket, number| {
                    push(socket, &submit("missing", number, 0))
                }),
                1 => self.burst("partially sent frames", |socket, number| {
                    let mut announced = submit("single", number, 0);
                    let metadata = announced.len() - 16;
                    announced[..4].copy_from_slice(&(metadata as u32 + (1 << 20)).to_le_bytes());
                    announced.extend(*b"xx");
                    // The supervisor treats everything that follows on the connection as payload.
                    push(socket, &announced) && number == 0
                }),
                _ => self.burst("rubbish", |socket, _| push(socket, &[0xFF; 64])),
            };
            done.push((at_us, burst));
            pause(random.below(500));
        }
        done
    }

    fn burst(&self, name: &'static str, mut one: impl FnMut(&mut UnixStream, u64) -> bool) -> &'static str {
        let connections = (0..20).filter_map(|_| {
            let mut socket = UnixStream::connect(self.folder.join("jobs.sock")).ok()?;
            socket.set_write_timeout(Some(Duration::from_millis(100))).ok()?;
            socket.set_read_timeout(Some(Duration::from_millis(100))).ok()?;
            push(&mut socket, &hello()).then_some(socket)
        });
        for mut socket in connections.collect::<Vec<_>>() {
            for number in 0..50 {
                if self.is_over() || !one(&mut socket, number) {
                    break;
                }
            }
            let mut answers = [0; 4096];
            let _ = socket.read(&mut answers);
        }
        name
    }
}

/// Sleeps for the given number of milliseconds.
pub fn pause(ms: usize) {
    std::thread::sleep(Duration::from_millis(ms as u64));
}

/// Writes bytes to a socket. Returns true if all bytes were written.
fn push(socket: &mut UnixStream, bytes: &[u8]) -> bool {
    socket.write_all(bytes).is_ok()
}

fn frame<M: bincode::Encode>(kind: u8, number: u64, message: &M) -> Vec<u8> {
    let mut metadata = Vec::new();
    codec::encode(message, &[], &mut metadata).expect("the metadata fits into a frame");
    let length = metadata.len() as u32;
    let header = Header { length, kind, flags: 0, metadata_length: metadata.len() as u16, number };
    let mut bytes = header.encode().to_vec();
    bytes.extend(metadata);
    bytes
}

fn hello() -> Vec<u8> {
    let hello = Hello {
        version_min: 1,
        version_max: 1,
        role: role::CLIENT,
        frame_bytes_max: u32::MAX,
        capabilities: 0,
        name: "flood",
        version: "0",
    };
    frame(kind::HELLO, MAGIC, &hello)
}

fn submit(bulkhead: &str, number: u64, deadline_us: u64) -> Vec<u8> {
    let submit =
        Submit { bulkhead, operation: "", tenant: "", deadline_us, priority: 1, idempotent: 0, cost: 0 };
    frame(kind::SUBMIT, number, &submit)
}
