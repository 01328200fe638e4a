//! Fair shares of memory and client connections: no user or bulkhead can take the share of another.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use bulkhead_shared::client_protocol::{Hello, OutcomeMessage, Submit, role};
use bulkhead_shared::codec;
use bulkhead_shared::frame::{HEADER_BYTES, Header, MAGIC, kind};
use bulkhead_shared::{Outcome, Priority, Verdict};
use bulkhead_tests::http::{Answer, Place, Socket};
use bulkhead_tests::{PATIENCE, Supervisor, not_run, programs, resident_bytes, tally, wait_for};
use nix::sys::signal::Signal;
use nix::unistd::Uid;
use serde_json::Value;

const MIB: usize = 1 << 20;

/// User ID of another user, which need not exist on this machine.
const BOB: u32 = 61_002;

/// Two bulkheads with one permit each. Tests occupy the workers until the file `go` exists, so that later
/// jobs wait.
const BUSY: &str = "[bulkhead.a]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 100000\ndeadline = \"600s\"\n\
                    [bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 100000\ndeadline = \"600s\"\n";

/// Client that encodes its own frames instead of using the client library.
struct Caller {
    socket: UnixStream,
    number: u64,
}

impl Caller {
    fn of(supervisor: &Supervisor) -> Self {
        let socket = bulkhead_tests::dial(&supervisor.socket()).unwrap();
        let mut caller = Self { socket, number: 0 };
        let hello = Hello {
            version_min: 1,
            version_max: 1,
            role: role::CLIENT,
            frame_bytes_max: u32::MAX,
            capabilities: 0,
            name: "test",
            version: "0",
        };
        caller.push(kind::HELLO, MAGIC, &hello, b"", 0);
        assert_eq!(caller.next().unwrap().0.kind, kind::CLIENT_WELCOME);
        caller
    }

    /// Sends a frame without the last `later` bytes of its payload.
    fn push<M: bincode::Encode>(&mut self, kind: u8, number: u64, message: &M, payload: &[u8], later: usize) {
        let mut metadata = Vec::new();
        codec::encode(message, &[], &mut metadata).unwrap();
        let length = u32::try_from(metadata.len() + payload.len() + later).unwrap();
        let header = Header { length, kind, flags: 0, metadata_length: metadata.len() as u16, number };
        let mut bytes = header.encode().to_vec();
        bytes.extend(metadata);
        bytes.extend(payload);
        let _ = self.socket.write_all(&bytes);
    }

    fn submit(&mut self, job: &Submit<'_>, payload: &[u8], later: usize) -> u64 {
        self.number += 1;
        self.push(kind::SUBMIT, self.number, job, payload, later);
        self.number
    }

    /// Occupies the worker of a bulkhead until the file `go` exists.
    fn occupy(&mut self, supervisor: &Supervisor, bulkhead: &str) {
        let wait = format!("steps:wait {}", supervisor.file("go").display());
        self.submit(&Submit { bulkhead, operation: &wait, ..PLAIN }, b"", 0);
        supervisor.wait_number(bulkhead, "in_flight", 1);
    }

    fn next(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut bytes = [0; HEADER_BYTES];
        self.socket.read_exact(&mut bytes).ok()?;
        let header = Header::decode(&bytes).check().unwrap();
        let mut rest = vec![0; header.length as usize];
        self.socket.read_exact(&mut rest).ok()?;
        rest.truncate(header.metadata_length.into());
        Some((header, rest))
    }

    fn outcome(&mut self) -> (u64, Outcome) {
        let (header, metadata) = self.next().expect("the connection stays open");
        assert_eq!(header.kind, kind::OUTCOME);
        let (message, _) = codec::decode::<OutcomeMessage<'_>>(&metadata, &[]).unwrap();
        (header.number, message.to_outcome().unwrap())
    }

    /// Returns the outcomes of all jobs, by job number. Each job must have exactly one outcome.
    fn outcomes(&mut self) -> BTreeMap<u64, String> {
        let mut all = BTreeMap::new();
        while (all.len() as u64) < self.number {
            let (number, outcome) = self.outcome();
            assert_eq!(all.insert(number, name(&outcome)), None, "job {number} has two outcomes");
        }
        all
    }
}

fn name(outcome: &Outcome) -> String {
    match &outcome.verdict {
        Verdict::Rejected { reason, .. } => format!("{reason}"),
        other => other.name().to_owned(),
    }
}

const PLAIN: Submit<'static> =
    Submit { bulkhead: "a", operation: "", tenant: "", deadline_us: 0, priority: 1, idempotent: 0, cost: 0 };

/// Returns true if the test can run programs as another user. Otherwise prints a `NOT RUN` message and returns false.
fn may_be_another() -> bool {
    if Uid::effective().is_root() {
        return true;
    }
    not_run!("running a program as another user requires root");
    false
}

const ANYONE: &str = "[[access]]\nuid = 0\n[[access]]\nuid = 61002\n";

/// Gives other users access to the sockets and to copies of the programs.
fn open(supervisor: &Supervisor) {
    std::fs::set_permissions(supervisor.folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let programs = programs();
    let copied = Command::new("cp")
        .args([programs.join("bulkhead"), programs.join("caller")])
        .arg(supervisor.folder.path())
        .status();
    assert!(copied.unwrap().success());
}

/// Runs `bulkhead submit … --json` as the other user.
fn by_bob(supervisor: &Supervisor, arguments: &[&str]) -> Child {
    let mut command = Command::new(supervisor.file("caller"));
    command.args(["as", &BOB.to_string(), &BOB.to_string(), ""]).arg(supervisor.file("bulkhead"));
    command.arg("--socket").arg(supervisor.socket()).args(["submit", "--json"]).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn end(child: Child) -> String {
    let ran = child.wait_with_output().unwrap();
    let object: Value = serde_json::from_slice(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"));
    format!("{}/{}", object["outcome"].as_str().unwrap(), object["reason"].as_str().unwrap_or("-"))
}

/// Checks that each submitted job has an outcome, is in flight, or is queued.
fn adds_up(supervisor: &Supervisor, bulkhead: &str) {
    let snapshot = supervisor.snapshot(bulkhead);
    let number = |name: &str| snapshot[name].as_u64().unwrap();
    let rejected: u64 = snapshot["rejected"].as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum();
    let outcomes = ["done", "failed", "crashed", "deadline_exceeded", "cancelled"].map(number);
    let held = number("in_flight") + number("queued");
    assert_eq!(number("submitted"), outcomes.iter().sum::<u64>() + rejected + held, "{snapshot}");
}

#[test]
fn announced_payloads_use_no_memory_before_they_arrive() {
    let supervisor = Supervisor::start_with("max_payload = \"4MiB\"\nmax_buffered = \"64MiB\"", BUSY);
    let mut honest = Caller::of(&supervisor);
    // The honest client uses and frees memory first. Clients that only announce payloads must not occupy the freed
    // memory.
    honest.submit(&PLAIN, &vec![1; 4 * MIB], 0);
    assert_eq!(name(&honest.outcome().1), "ok");
    let before = resident_bytes(supervisor.pid());
    let mut hostile: Vec<Caller> = (0..600).map(|_| Caller::of(&supervisor)).collect();
    for caller in &mut hostile {
        caller.submit(&PLAIN, b"x", MIB - 1);
    }
    // Once the honest job has been answered, the supervisor has read all announcements. Each hostile client then sends
    // one more byte.
    honest.submit(&PLAIN, b"", 0);
    assert_eq!(name(&honest.outcome().1), "ok");
    for caller in &mut hostile {
        caller.socket.write_all(b"x").unwrap();
    }
    honest.submit(&PLAIN, b"", 0);
    assert_eq!(name(&honest.outcome().1), "ok");
    for round in 0..3 {
        honest.submit(&PLAIN, &vec![round; 3 * MIB], 0);
        assert_eq!(name(&honest.outcome().1), "ok", "announced payloads must not reduce the free memory");
    }
    let more = resident_bytes(supervisor.pid()).saturating_sub(before) as usize;
    assert!(more < 48 * MIB, "memory grew by {more} bytes");
}

#[test]
fn second_user_gets_its_share_of_memory() {
    if !may_be_another() {
        return;
    }
    let supervisor = Supervisor::start_with(
        "max_payload = \"4MiB\"\nmax_buffered = \"32MiB\"",
        &format!("{BUSY}{ANYONE}"),
    );
    open(&supervisor);
    let mut greedy = Caller::of(&supervisor);
    greedy.occupy(&supervisor, "a");
    let payload = vec![7; MIB];
    let classes = [Priority::Critical, Priority::BestEffort, Priority::Normal];
    for n in 0..60 {
        let priority = classes[n % 3].code();
        greedy.submit(&Submit { priority, operation: "pid", ..PLAIN }, &payload, 0);
    }
    // Only 31 payloads of 1 MiB fit into 32 MiB, because job records use memory as well.
    supervisor.wait_number("a", "queued", 31);
    wait_for("the other 29 jobs are rejected", || {
        (supervisor.snapshot("a")["rejected"]["overloaded"] == 29).then_some(())
    });
    let file = supervisor.file("payload");
    std::fs::write(&file, vec![8; 3 * MIB]).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
    let path = file.to_str().unwrap().to_owned();
    let bob: Vec<Child> =
        (0..3).map(|_| by_bob(&supervisor, &["a", "pid", "--payload-file", path.as_str()])).collect();
    // Bob's jobs are queued, so jobs of the greedy client must have been rejected to free memory.
    wait_for("all of Bob's jobs are submitted", || (supervisor.number("a", "submitted") == 64).then_some(()));
    wait_for("eight jobs of the greedy client are rejected", || {
        (supervisor.snapshot("a")["rejected"]["overloaded"].as_u64() >= Some(37)).then_some(())
    });
    adds_up(&supervisor, "a");
    supervisor.touch("go");
    for child in bob {
        assert_eq!(end(child), "ok/-", "a job within Bob's share was rejected");
    }
    let outcomes = greedy.outcomes();
    let of = |class: usize| {
        let names =
            outcomes.iter().filter(|(number, _)| **number > 1 && (**number as usize - 2) % 3 == class);
        tally(names.map(|(_, name)| name.clone()))
    };
    // The supervisor rejected the newest jobs of the lowest priority first.
    let kept = |class: usize| of(class).get("ok").copied().unwrap_or(0);
    assert!(kept(0) >= 10 && kept(2) >= 10 && kept(1) <= 4, "{:?} {:?} {:?}", of(0), of(1), of(2));
    adds_up(&supervisor, "a");
}

#[test]
fn second_bulkhead_gets_its_share_of_memory() {
    let supervisor = Supervisor::start_with("max_payload = \"4MiB\"\nmax_buffered = \"16MiB\"", BUSY);
    let mut caller = Caller::of(&supervisor);
    caller.occupy(&supervisor, "a");
    caller.occupy(&supervisor, "b");
    for _ in 0..20 {
        caller.submit(&Submit { operation: "pid", ..PLAIN }, &vec![7; MIB], 0);
    }
    supervisor.wait_number("a", "queued", 15);
    for _ in 0..4 {
        caller.submit(&Submit { bulkhead: "b", operation: "pid", ..PLAIN }, &vec![8; MIB], 0);
    }
    supervisor.wait_number("b", "queued", 4);
    wait_for("bulkhead `a` has freed memory", || (supervisor.number("a", "queued") <= 11).then_some(()));
    supervisor.touch("go");
    let outcomes = caller.outcomes();
    let last: Vec<_> = outcomes.values().rev().take(4).collect();
    assert_eq!(last, ["ok"; 4]);
    adds_up(&supervisor, "a");
    adds_up(&supervisor, "b");
}

#[test]
fn memory_pressure_disconnects_clients_with_incomplete_frames() {
    if !may_be_another() {
        return;
    }
    let supervisor = Supervisor::start_with(
        "max_payload = \"4MiB\"\nmax_buffered = \"14MiB\"",
        &format!("{BUSY}{ANYONE}"),
    );
    open(&supervisor);
    // Occupies most of the memory with frames that are never completed.
    let mut hoarders: Vec<Caller> = (0..3).map(|_| Caller::of(&supervisor)).collect();
    for caller in &mut hoarders {
        caller.submit(&PLAIN, &vec![1; 3 * MIB + MIB / 8], MIB - MIB / 8);
    }
    let file = supervisor.file("payload");
    std::fs::write(&file, vec![8; 3 * MIB]).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
    let path = file.to_str().unwrap().to_owned();
    for _ in 0..3 {
        assert_eq!(end(by_bob(&supervisor, &["a", "pid", "--payload-file", path.as_str()])), "ok/-");
    }
    // At least one of these clients got a reason and was disconnected.
    let closed = hoarders.iter_mut().filter_map(|caller| {
        caller.socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let (number, outcome) = caller.next().map(|(header, metadata)| {
            let (message, _) = codec::decode::<OutcomeMessage<'_>>(&metadata, &[]).unwrap();
            (header.number, message.to_outcome().unwrap())
        })?;
        assert_eq!((number, name(&outcome).as_str()), (1, "overloaded"));
        let is_closed = caller.next().is_some_and(|(header, _)| header.kind == kind::REFUSED);
        is_closed.then_some(())
    });
    assert!(closed.count() > 0);
}

#[test]
fn memory_rejection_is_retryable_only_within_the_deadline() {
    let supervisor = Supervisor::start_with("max_payload = \"1MiB\"\nmax_buffered = \"2MiB\"", BUSY);
    let mut caller = Caller::of(&supervisor);
    caller.occupy(&supervisor, "a");
    let payload = vec![1; 900_000];
    for _ in 0..2 {
        caller.submit(&PLAIN, &payload, 0);
    }
    supervisor.wait_number("a", "queued", 2);
    // The default and the maximum deadline are 600 s. The suggested retry delay is one second.
    for (asked, applied, is_retryable) in
        [(0, 600_000_000, true), (u64::MAX, 600_000_000, true), (500_000, 500_000, false)]
    {
        let number = caller.submit(&Submit { deadline_us: asked, ..PLAIN }, &payload, 0);
        let (answered, outcome) = caller.outcome();
        assert_eq!((answered, name(&outcome).as_str()), (number, "overloaded"));
        assert_eq!((outcome.deadline, outcome.retryable), (Duration::from_micros(applied), is_retryable));
        assert_eq!(outcome.retry_after, Some(Duration::from_secs(1)));
    }
}

#[test]
fn memory_limit_includes_job_records_and_names() {
    let supervisor = Supervisor::start_with("max_payload = \"1MiB\"\nmax_buffered = \"4MiB\"", BUSY);
    let before = resident_bytes(supervisor.pid());
    let mut caller = Caller::of(&supervisor);
    caller.occupy(&supervisor, "a");
    let mut reader = Caller { socket: caller.socket.try_clone().unwrap(), number: 20_001 };
    let reading = std::thread::spawn(move || tally(reader.outcomes().into_values()));
    let operation = "o".repeat(256);
    for n in 0..20_000 {
        let tenant = format!("{n:0>256}");
        caller.submit(&Submit { operation: &operation, tenant: &tenant, ..PLAIN }, b"", 0);
    }
    wait_for("all jobs are submitted", || (supervisor.number("a", "submitted") == 20_001).then_some(()));
    let queued = supervisor.number("a", "queued") as usize;
    assert!((500..4 * MIB / 1024).contains(&queued), "{queued} jobs of at least 1 KiB are waiting");
    let more = resident_bytes(supervisor.pid()).saturating_sub(before) as usize;
    assert!(more < 40 * MIB, "memory grew by {more} bytes");
    adds_up(&supervisor, "a");
    supervisor.touch("go");
    let outcomes = reading.join().unwrap();
    assert_eq!(outcomes.values().sum::<usize>(), 20_001);
    assert_eq!(outcomes["overloaded"], 20_000 - queued, "{outcomes:?}");
    assert_eq!(outcomes["failed"], queued, "every queued job fails because its operation does not exist");
    assert_eq!(supervisor.number("a", "queued"), 0);
}

#[test]
fn idle_connection_is_closed_to_make_room_for_another_user() {
    if !may_be_another() {
        return;
    }
    let supervisor = Supervisor::start_with("max_clients = 6", &format!("{BUSY}{ANYONE}"));
    open(&supervisor);
    let mut busy = Caller::of(&supervisor);
    busy.occupy(&supervisor, "b");
    // A single user can occupy all connections.
    let mut idle: Vec<Caller> = (0..5).map(|_| Caller::of(&supervisor)).collect();
    // Makes `idle[0]` the connection with the shortest idle time.
    idle[0].submit(&PLAIN, b"x", 0);
    assert_eq!(name(&idle[0].outcome().1), "ok");
    for _ in 0..3 {
        assert_eq!(end(by_bob(&supervisor, &["a"])), "ok/-");
    }
    // The supervisor closed the connection with the longest idle time and sent a reason.
    let (header, _) = idle[1].next().expect("the closed connection gets a reason");
    assert_eq!(header.kind, kind::REFUSED);
    idle[0].submit(&PLAIN, b"x", 0);
    assert_eq!(name(&idle[0].outcome().1), "ok");
    supervisor.touch("go");
    assert_eq!(name(&busy.outcome().1), "ok", "a connection with a job in flight stays");
}

#[test]
fn new_client_is_rejected_if_no_connection_is_idle() {
    if !may_be_another() {
        return;
    }
    let supervisor = Supervisor::start_with("max_clients = 2", &format!("{BUSY}{ANYONE}"));
    open(&supervisor);
    let mut busy = [Caller::of(&supervisor), Caller::of(&supervisor)];
    busy[0].occupy(&supervisor, "a");
    busy[1].occupy(&supervisor, "b");
    let ran = by_bob(&supervisor, &["a"]).wait_with_output().unwrap();
    assert_eq!(ran.status.code(), Some(75), "{ran:?}");
    supervisor.touch("go");
    busy.iter_mut().for_each(|caller| assert_eq!(name(&caller.outcome().1), "ok"));
}

// Stopping the supervisor.

#[test]
fn shutdown_does_not_reset_http_connections() {
    for over_tcp in [false, true, false] {
        let folder = tempfile::tempdir().unwrap();
        let token = folder.path().join("token");
        std::fs::write(&token, "a-token-of-the-tests\n").unwrap();
        std::fs::set_permissions(&token, PermissionsExt::from_mode(0o600)).unwrap();
        let mut supervisor = Supervisor::launch(
            folder,
            "drain_timeout = \"20s\"\nhttp = \"127.0.0.1:0\"\nhttp_token_file = \"token\"",
            "[bulkhead.a]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 4\nmax_queue = 100\n",
        );
        wait_for("the supervisor is ready", || (supervisor.try_get("/readyz")?.0 == 200).then_some(()));
        let place = if over_tcp { Place::tcp(&supervisor) } else { Place::of(&supervisor) };
        let post = || {
            let place = place.clone();
            std::thread::spawn(move || post_until_closed(&place))
        };
        let posters: Vec<_> = (0..16).map(|_| post()).collect();
        wait_for("50 jobs are done", || (supervisor.number("a", "done") > 50).then_some(()));
        supervisor.signal(Signal::SIGTERM);
        assert!(supervisor.wait().success());
        let mut ends: BTreeMap<String, usize> = BTreeMap::new();
        for poster in posters {
            poster.join().unwrap().into_iter().for_each(|end| *ends.entry(end).or_default() += 1);
        }
        let expected = ["200 -", "503 draining", "503 overloaded"];
        let odd = ends.keys().filter(|end| !expected.contains(&end.as_str())).count();
        assert_eq!(odd, 0, "over TCP {over_tcp}: {ends:?}");
    }
}

/// Sends jobs one after another until the supervisor stops listening. Returns the status and reason of each job.
fn post_until_closed(place: &Place) -> Vec<String> {
    let mut ends = Vec::new();
    loop {
        let socket = match place {
            Place::Unix(path) => UnixStream::connect(path).map(Socket::Unix),
            Place::Tcp(address) => TcpStream::connect(address).map(Socket::Tcp),
        };
        let Ok(mut socket) = socket else { return ends };
        socket.give_up_after(PATIENCE);
        let body = vec![b'x'; 200_000];
        let bearer = "Authorization: Bearer a-token-of-the-tests";
        socket.send_head("POST", "/v1/bulkheads/a/jobs", &[bearer], Some(body.len()));
        let is_sent = socket.write_all(&body).is_ok();
        ends.push(match Answer::read(socket) {
            Some(answer) if answer.status == 200 => "200 -".to_owned(),
            Some(answer) => format!("{} {}", answer.status, answer.json()["reason"].as_str().unwrap_or("-")),
            None => format!("no answer, {is_sent}"),
        });
    }
}
