//! Runs the workloads of the bench with two Rust libraries, `tonic` and `ipc-channel`.
//!
//! Reads one order per line from standard input, and writes one JSON object per order (see `bench/src/peers.rs`).

use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

mod ipc;
mod rpc;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match arguments[..] {
        // With one hop, the client connects directly to the server. With two hops, the client connects to a relay.
        ["tonic", hops] => runtime.block_on(rpc::drive(hops.parse()?)),
        ["tonic-server", socket] => runtime.block_on(rpc::serve(socket, None)),
        ["tonic-relay", socket, next] => runtime.block_on(rpc::serve(socket, Some(next))),
        ["ipc-channel"] => ipc::drive(),
        ["ipc-channel-worker", name] => ipc::work(name),
        _ => Err("no peer was named: use `tonic HOPS` or `ipc-channel`".into()),
    }
}

/// A command that the bench sends to this program.
enum Order {
    /// Sends `total` requests of `bytes` bytes, one at a time.
    Latency { bytes: usize, total: usize },
    /// Sends `total` requests of `bytes` bytes, `lanes` at a time.
    Rate { lanes: usize, bytes: usize, total: usize },
    /// Kills the worker `total` times. After each kill, waits for the next reply.
    Recovery { total: usize },
}

fn orders() -> impl Iterator<Item = Result<Order>> {
    std::io::stdin().lock().lines().map(|line| {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        Ok(match words[..] {
            ["latency", bytes, total] => Order::Latency { bytes: bytes.parse()?, total: total.parse()? },
            ["rate", lanes, bytes, total] => {
                Order::Rate { lanes: lanes.parse()?, bytes: bytes.parse()?, total: total.parse()? }
            }
            ["recovery", total] => Order::Recovery { total: total.parse()? },
            _ => return Err(format!("unknown order: {line}").into()),
        })
    })
}

fn tell(key: &str, value: f64) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{{\"{key}\": {value}}}")?;
    Ok(out.flush()?)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn rate(total: usize, began: Instant) -> f64 {
    total as f64 / began.elapsed().as_secs_f64()
}
