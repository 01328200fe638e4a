//! Tests of the configuration through its public interface. Each test parses the text of a file and checks the values
//! or the messages.

mod accepted;
mod access;
mod admission;
mod confinement;
mod crashes;
mod documentation;
mod exec;
mod fallback;
mod http;
mod json_schema;
mod paths;
mod random;
mod refused;
mod relations;
mod sources;
mod tenants;
mod values;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use proptest::test_runner::Config as PropertyConfig;
use tempfile::TempDir;

use super::*;

/// Returns the settings for a property test with at least `least` cases. `PROPTEST_CASES` can increase the number of
/// cases.
fn cases(least: u32) -> PropertyConfig {
    let asked = PropertyConfig::default();
    PropertyConfig { cases: asked.cases.max(least), failure_persistence: None, ..asked }
}

/// Test fixture: a folder with the files that the tested configurations refer to, and an environment that does not
/// depend on the user who runs the tests.
struct Folder {
    dir: TempDir,
    process_env: ProcessEnv,
}

impl Folder {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let bin = dir.path().join("bin");
        fs::create_dir(&bin).unwrap();
        let process_env = ProcessEnv {
            root: true,
            runtime_dir: None,
            search_path: Some(bin.into_os_string()),
            credentials: None,
            is_embedded: false,
        };
        let folder = Self { dir, process_env };
        fs::create_dir(folder.path("work")).unwrap();
        for program in ["thumbnail-worker", "bin/pdftotext", "bin/tool"] {
            folder.write(program, 0o755);
        }
        folder.write("libthumb.so", 0o644);
        folder.token("token", "0123456789abcdef\n", 0o600);
        folder.token("jobs-token", "a-token-for-the-jobs\n", 0o600);
        folder.token("read-token", "a-token-for-readers\n", 0o640);
        folder
    }

    fn write(&self, name: &str, mode: u32) {
        fs::write(self.path(name), "#!/bin/true\n").unwrap();
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }

    fn token(&self, name: &str, text: &str, mode: u32) {
        fs::write(self.path(name), text).unwrap();
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn parse(&self, text: &str) -> Result<Config, ConfigErrors> {
        let parsed = parse_in(text, &self.path("workers.toml"), &self.process_env);
        // Every text that a test parses is also checked against the JSON schema.
        json_schema::compare(text, &parsed);
        parsed
    }

    #[track_caller]
    fn accept(&self, text: &str) -> Config {
        self.parse(text).unwrap_or_else(|errors| panic!("refused:\n{errors}"))
    }

    /// Parses the summary of a configuration. Copies `has_own_pressure` and `has_deadline_max` from the original,
    /// because the summary does not show where `pressure` and `deadline_max` were set.
    #[track_caller]
    fn again(&self, config: &Config) -> Config {
        let mut again = self.accept(&config.summary());
        for (one, other) in again.bulkheads.iter_mut().zip(&config.bulkheads) {
            one.has_own_pressure = other.has_own_pressure;
            one.has_deadline_max = other.has_deadline_max;
        }
        again
    }

    #[track_caller]
    fn reject(&self, text: &str) -> Vec<Problem> {
        match self.parse(text) {
            Ok(config) => panic!("accepted:\n{text}\nas\n{}", config.summary()),
            Err(errors) => errors.problems().to_vec(),
        }
    }

    /// Checks that the text has exactly one problem, with the given position, message and help.
    #[track_caller]
    fn reject_one(&self, text: &str, at: (usize, usize), message: &str, help: &str) {
        let problems = self.reject(text);
        assert_eq!(problems.len(), 1, "{problems:#?}");
        assert_problem(&problems[0], at, message, help);
    }
}

#[track_caller]
fn assert_problem(problem: &Problem, (line, column): (usize, usize), message: &str, help: &str) {
    assert_eq!(problem.at, Some(Position { line, column }), "{problem:#?}");
    assert!(problem.message.contains(message), "{problem:#?} should say {message:?}");
    let given = problem.help.as_deref().unwrap_or_default();
    assert!(given.contains(help), "{problem:#?} should help with {help:?}");
}

/// Returns the configuration of a minimal bulkhead. `lines` is inserted at line 3.
fn bulkhead(lines: &str) -> String {
    format!("[bulkhead.a]\nexec = [\"tool\"]\n{lines}\n")
}

/// A file that sets every key to a value other than the default.
const FULL: &str = r#"
[supervisor]
socket = "s/jobs.sock"
socket_mode = "0660"
admin = "/run/other/admin.sock"
http = "[::1]:9465"
http_token_file = "token"
jobs_http = "[::1]:9466"
jobs_http_max = 7
drain_notice = "2s"
drain_timeout = "5s"
max_clients = 7
max_payload = "32MiB"
max_buffered = "64MiB"
max_pooled = "16MiB"
crash_dir = "crashes"
crash_keep = 7
crash_payloads = false
tenant_labels = 7
worker_uids = "200000-200999"

[[access]]
user = "root"
bulkheads = ["aa", "zz.last"]

[[access]]
group = "root"

[[access]]
gid = 7
tenants = ["acme", "big \"tenant\"\u0085"]

[[access]]
token_file = "jobs-token"
tenants = ["acme"]

[[access]]
token_file = "read-token"
role = "read"

[defaults]
grace = "50ms"
env = { FROM = "defaults", OVER = "defaults" }
restart = { backoff = "200ms", max = 9 }
pressure = { warn = 0.5 }
breaker = { window = "1m", probes = 2 }
fallback = ["mm"]
poison = { within = "1d" }
sandbox = { profile = "default", read = ["work"], best_effort = ["landlock"] }
cgroup = { memory = "512MiB", cpu = 2 }

[bulkhead."zz.last"]
command = ["./thumbnail-worker", "--fast", ""]
env_files = { SECRET = "token", "odd secret" = "read-token" }
env = { OVER = "own", "odd name" = "line\nend \"quoted\" \\ \u001b" }
cwd = "work"
processes = 2
max_in_flight = 3
max_queue = 100
queue_timeout = "2s"
run_limit = "1s"
deadline = "5s"
deadline_max = "1m 30s"
max_payload = "8MiB"
max_result = 12345
overflow = "evict-oldest"
priority = { critical_reserve = 0.2 }
pressure = { reject = 0.95 }
rate_limit = { per_second = 166.5, burst = 200, per = "tenant" }
tenants = { max_in_flight = 2, max_queue = 20 }
breaker = { min_calls = 10, failure_rate = 0.25, slow_call = "1s", slow_rate = 0.75, open_for = "2s", probes = 3 }
start = { handshake = "1s", ready = "2s", mode = "spawn", spares = 2 }
health = { heartbeat = "250ms", missed = 3 }
recycle = { jobs = 10000, rss = "300MiB", age = "1h" }
fallback = ["aa", "mm"]
poison = { crashes = 2 }
adaptive = { min = 2, max = 5, target = "50ms", mode = "monitor" }

[bulkhead."zz.last".sandbox]
profile = "strict"
network = true
read = ["/usr", "work/../bin"]
write = ["work", "/tmp"]
tmp = "1MiB"
user = "auto"
best_effort = ["user_namespace", "cgroup"]

[bulkhead."zz.last".sandbox.syscalls]
allow = ["mlock", "mbind"]
deny = ["getpid"]

[bulkhead."zz.last".cgroup]
pids = 32
cpu = 1.5

[bulkhead."zz.last".retry]
attempts = 3
budget = 0.5

[bulkhead."zz.last".tenant."big \"tenant\"\u0085"]
max_in_flight = 4
max_queue = 50
rate_limit = { per_second = 500.5, burst = 600 }

[bulkhead."zz.last".restart]
policy = "on-failure"
backoff_max = "1s"
within = "10s"

[bulkhead."zz.last".rlimits]
as = "1GiB"
cpu = "1500ms"
nofile = 64
nproc = 16
fsize = "16MiB"
core = 0
data = "2GiB"
stack = "unlimited"
memlock = 0
rss = 1000
locks = 5
sigpending = 6
msgqueue = "800KiB"
nice = 20
rtprio = 1
rttime = "200ms"

[bulkhead.aa]
library = "libthumb.so"
entry = "thumb_handle"
sandbox = { profile = "none" }

[bulkhead.mm]
exec = ["pdftotext", "in.pdf", "out.txt"]
output_grace = "5s"
exit_status = { ok = [0, 1], caller = [2, 75] }
files = { input = "in.pdf", output = "out.txt" }
fallback = []
max_queue = 7
sandbox = { user = "root", network = { tcp_ports = [443, 5432], udp = true } }
tenants = { isolate = true, max_active = 8, idle = "5m" }

[bulkhead.mm.tenant.none]

[bulkhead.mm.tenant.acme]
processes = 3
max_in_flight = 2
max_queue = 0

[bulkhead.mm.tenant.acme.rate_limit]
per_second = 7
"#;
