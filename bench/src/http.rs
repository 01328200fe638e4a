//! Measures jobs per second over HTTP (`jobs_http`), with persistent connections and with a new connection for each job,
//! and reports the ratio of the two rates. `measures` calls `all`. Latencies are not measured.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Instant;

use crate::pairs::paired;
use crate::plan::Plan;
use crate::real::Chain;
use crate::report::{Report, Target};
use crate::{Result, processes};

/// Prefix of the names of the measurements in this module.
pub(crate) const GROUP: &str = "http";

/// Number of clients. Each client sends one job at a time.
const CLIENTS: usize = 16;

const TOKEN: &str = "a-token-of-the-bench";

/// Takes all requested measurements. Must be called within a `LocalSet`.
pub(crate) async fn all(plan: &Plan, report: &Report) -> Result<()> {
    let name = format!("{GROUP}: persistent connections over one connection per job, {CLIENTS} clients");
    if !report.wants(&name) {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let token_file = folder.path().join("token");
    let mut options = std::fs::OpenOptions::new();
    options.create_new(true).write(true).mode(0o600).open(&token_file)?.write_all(TOKEN.as_bytes())?;
    // Finds a free port, which the supervisor then binds.
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let worker = processes::worker()?;
    let config = format!(
        "[supervisor]\nsocket = \"jobs.sock\"\njobs_http = \"{address}\"\n[[access]]\ntoken_file = {token_file:?}\n\
         [bulkhead.one]\ncommand = [{worker}]\nmax_in_flight = 2\nmax_queue = {CLIENTS}\n\
         sandbox = {{ profile = \"none\" }}\n"
    );
    let chain = Chain::start(&processes::programs()?, &config).await?;
    run(address, 1, true)?;
    let mut rates = Vec::new();
    for _ in plan.rounds() {
        rates.push((run(address, plan.small / 2, false)?, run(address, plan.small, true)?));
    }
    report.add(paired(name, "jobs/s", &rates, Target::AtLeast, 2.0));
    drop(chain);
    Ok(())
}

/// Returns the number of jobs per second.
fn run(address: SocketAddr, jobs: usize, is_kept_alive: bool) -> Result<f64> {
    let each = jobs.div_ceil(CLIENTS);
    let began = Instant::now();
    std::thread::scope(|scope| {
        let client = || -> std::io::Result<()> {
            let mut kept = None;
            for _ in 0..each {
                let mut connection = match kept.take() {
                    Some(connection) => connection,
                    None => BufReader::new(connect(address)?),
                };
                send(&mut connection, is_kept_alive)?;
                kept = is_kept_alive.then_some(connection);
            }
            Ok(())
        };
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(client)).collect();
        let panicked = |_| Err(std::io::Error::other("a panic"));
        clients.into_iter().try_for_each(|client| client.join().unwrap_or_else(panicked))
    })?;
    Ok((each * CLIENTS) as f64 / began.elapsed().as_secs_f64())
}

fn connect(address: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = TcpStream::connect(address)?;
    socket.set_nodelay(true)?;
    Ok(socket)
}

/// Sends a job of 64 B and reads the response.
fn send(connection: &mut BufReader<TcpStream>, is_kept_alive: bool) -> std::io::Result<()> {
    let close = if is_kept_alive { "" } else { "Connection: close\r\n" };
    let request = format!(
        "POST /v1/bulkheads/one/jobs HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {TOKEN}\r\n\
         Content-Length: 64\r\n{close}\r\n{:64}",
        ""
    );
    connection.get_mut().write_all(request.as_bytes())?;
    let (mut line, mut length, mut is_ok) = (String::new(), 0, false);
    loop {
        line.clear();
        connection.read_line(&mut line)?;
        is_ok |= line.starts_with("HTTP/1.1 200 ");
        if let Some(value) = line.strip_prefix("content-length: ") {
            length = value.trim().parse().unwrap_or(0);
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    connection.read_exact(&mut body)?;
    if is_ok { Ok(()) } else { Err(std::io::Error::other(String::from_utf8_lossy(&body).into_owned())) }
}
