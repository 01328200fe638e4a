//! A configuration written out as TOML, each value in full: what `--check` prints. Read again from the
//! same place it gives an equal configuration.

use std::fmt::{Display, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::checked::*;
use super::rlimits::Measure;
use super::rlimits::UNLIMITED;
use super::{defaults, units};

impl Config {
    /// The effective configuration as TOML, defaults written out.
    ///
    /// A path from the file stands here as it was resolved, but for `argv[0]`, which the program sees: what
    /// it was resolved to is a comment. Paths that are not UTF-8 cannot be written in TOML exactly.
    ///
    /// ```no_run
    /// let config = bulkhead_config::load("workers.toml".as_ref())?;
    /// println!("{}", config.summary());
    /// # Ok::<(), bulkhead_config::ConfigErrors>(())
    /// ```
    pub fn summary(&self) -> String {
        let is_root = rustix::process::geteuid().is_root();
        self.summary_where(if is_root { WorkerIds::Host } else { WorkerIds::None })
    }

    /// The same, by where the ids of workers with `user = "auto"` come from.
    pub fn summary_where(&self, ids: WorkerIds) -> String {
        let mut out = Lines { ids, ..Lines::default() };
        out.comment(format!("{}: {}", self.path.display(), self.counted()));
        out.supervisor(&self.supervisor);
        for entry in &self.access {
            out.access(entry);
        }
        out.defaults(&self.bulkheads);
        for bulkhead in &self.bulkheads {
            out.bulkhead(bulkhead);
        }
        out.text
    }

    fn counted(&self) -> String {
        let workers: u64 = self.bulkheads.iter().map(BulkheadConfig::workers_max).sum();
        let bulkheads = self.bulkheads.len() as u64;
        let plural = |count: u64| if count == 1 { "" } else { "s" };
        // Those of isolated tenants come and go.
        let isolated = self.bulkheads.iter().any(|bulkhead| bulkhead.isolation().is_some());
        let up_to = if isolated { "up to " } else { "" };
        format!("{bulkheads} bulkhead{}, {up_to}{workers} worker{}", plural(bulkheads), plural(workers))
    }
}

/// Where ids for workers of their own come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WorkerIds {
    /// There are none: workers have the supervisor's user.
    #[default]
    None,
    /// This user may start workers as any.
    Host,
    /// From `/etc/subuid`.
    Subordinate,
}

/// TOML under construction.
#[derive(Default)]
struct Lines {
    text: String,
    ids: WorkerIds,
}

impl Lines {
    fn line(&mut self, line: impl Display) {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "{line}");
    }

    fn comment(&mut self, comment: impl Display) {
        self.line(format_args!("# {}", printable(&comment.to_string())));
    }

    fn set(&mut self, key: &str, value: impl Display) {
        self.line(format_args!("{key} = {value}"));
    }

    fn supervisor(&mut self, supervisor: &SupervisorConfig) {
        self.line("\n[supervisor]");
        self.set("socket", path(&supervisor.socket));
        self.set("socket_mode", format_args!("\"{:04o}\"", supervisor.socket_mode));
        self.comment(format_args!("its folder, if it is missing, is made {:04o}", supervisor.folder_mode));
        self.set("admin", path(&supervisor.admin));
        match &supervisor.http {
            Some(http) => {
                self.set("http", string(&http.address.to_string()));
                self.set("http_token_file", path(&http.token_file));
            }
            None => self.comment("http: off"),
        }
        self.set("drain_timeout", duration(supervisor.drain_timeout));
        self.set("max_clients", supervisor.max_clients);
        self.set("max_payload", size(supervisor.max_payload));
        self.set("max_buffered", size(supervisor.max_buffered));
        self.crashes(supervisor);
        self.set("tenant_labels", supervisor.tenant_labels);
        match &supervisor.worker_uids {
            Some(uids) => self.set("worker_uids", string(&uids.to_string())),
            None => self.comment(format_args!(
                "worker_uids: {} for a supervisor that may use them",
                defaults::WORKER_UIDS
            )),
        }
    }

    fn crashes(&mut self, supervisor: &SupervisorConfig) {
        match &supervisor.crash_dir {
            Some(folder) => self.set("crash_dir", path(folder)),
            None => self.comment("crash_dir: none, reports are kept in memory"),
        }
        self.set("crash_keep", supervisor.crash_keep);
    }

    fn access(&mut self, entry: &AccessConfig) {
        self.line("\n[[access]]");
        match entry.who {
            Who::Uid(uid) => self.set("uid", uid),
            Who::Gid(gid) => self.set("gid", gid),
        }
        match &entry.bulkheads {
            Some(names) => self.set("bulkheads", strings(names)),
            None => self.comment("bulkheads: all"),
        }
        match &entry.tenants {
            Some(names) => self.set("tenants", strings(names)),
            None => self.comment("tenants: any, or none"),
        }
    }

    /// Only what a bulkhead cannot say for itself: how a queue that it does not have would be pressed.
    fn defaults(&mut self, bulkheads: &[BulkheadConfig]) {
        let preset = PressureConfig { warn: defaults::PRESSURE_WARN, reject: defaults::PRESSURE_REJECT };
        let unsaid = |bulkhead: &&BulkheadConfig| bulkhead.max_queue == 0 && bulkhead.pressure != preset;
        if let Some(bulkhead) = bulkheads.iter().find(unsaid) {
            self.line("\n[defaults]");
            self.set("pressure", pressure(&bulkhead.pressure));
        }
    }

    fn bulkhead(&mut self, bulkhead: &BulkheadConfig) {
        self.line(format_args!("\n[bulkhead.{}]", key(&bulkhead.name)));
        self.program(&bulkhead.program);
        let env: Vec<_> =
            bulkhead.env.iter().map(|(name, value)| format!("{} = {}", key(name), string(value))).collect();
        self.set("env", braced(&env));
        self.set("cwd", path(&bulkhead.cwd));
        self.set("processes", bulkhead.processes);
        self.set("max_in_flight", bulkhead.max_in_flight);
        self.set("max_queue", bulkhead.max_queue);
        match bulkhead.queue_timeout {
            Some(timeout) => self.set("queue_timeout", duration(timeout)),
            None => self.comment("queue_timeout: until the deadline"),
        }
        self.set("deadline", duration(bulkhead.deadline));
        self.set("deadline_max", duration(bulkhead.deadline_max));
        self.set("grace", duration(bulkhead.grace));
        self.set("max_payload", size(bulkhead.max_payload));
        self.set("max_result", size(bulkhead.max_result));
        self.admission(bulkhead);
        self.life(bulkhead);
        self.sandbox(&bulkhead.sandbox);
        match &bulkhead.cgroup {
            Some(limits) => self.set("cgroup", cgroup(limits)),
            None => self.comment("cgroup: off"),
        }
        let rlimits: Vec<_> = bulkhead.rlimits.iter().map(rlimit).collect();
        self.set("rlimits", braced(&rlimits));
        for (name, tenant) in &bulkhead.tenant {
            self.line(format_args!("\n[bulkhead.{}.tenant.{}]", key(&bulkhead.name), key(name)));
            self.tenant(tenant);
        }
    }

    /// Only `strict` holds `tmp` to its size at every moment: whoever reads one under `default` is told so.
    fn sandbox(&mut self, confinement: &SandboxConfig) {
        self.set("sandbox", sandbox(confinement));
        if confinement.wants_own_ids() {
            self.comment(whom(confinement, self.ids));
        }
        if confinement.profile == Profile::Default && confinement.tmp_bytes > 0 {
            self.comment(match self.ids {
                WorkerIds::Subordinate if confinement.wants_own_ids() => {
                    "sandbox.tmp: in memory, for ids of /etc/subuid"
                }
                _ => "sandbox.tmp: a folder on disk, which is looked at every second",
            });
        }
    }

    fn program(&mut self, program: &Program) {
        match program {
            Program::Command { argv, path } => self.arguments("command", argv, path),
            Program::Exec { argv, path } => self.arguments("exec", argv, path),
            Program::Library { path: library, entry } => {
                self.set("library", path(library));
                self.set("entry", string(entry));
            }
        }
    }

    fn arguments(&mut self, name: &str, argv: &[String], found: &Path) {
        self.set(name, strings(argv));
        self.comment(format_args!("runs {}", found.display()));
    }

    fn admission(&mut self, bulkhead: &BulkheadConfig) {
        self.set("overflow", format_args!("\"{}\"", bulkhead.overflow.name()));
        match bulkhead.max_queue {
            0 => self.comment("pressure: there is no queue"),
            _ => self.set("pressure", pressure(&bulkhead.pressure)),
        }
        match bulkhead.fallback.as_slice() {
            [] => self.comment("fallback: none"),
            names => self.set("fallback", strings(names)),
        }
        self.set_or_off("priority", bulkhead.priority.as_ref().map(priority));
        self.set_or_off("rate_limit", bulkhead.rate_limit.as_ref().map(rate_limit));
        self.set_or_off("tenants", bulkhead.tenants.as_ref().map(tenants));
        self.set_or_off("breaker", bulkhead.breaker.as_ref().map(breaker));
        self.set_or_off("retry", bulkhead.retry.as_ref().map(retry));
        self.set_or_off("poison", bulkhead.poison.as_ref().map(poison));
    }

    fn tenant(&mut self, tenant: &TenantConfig) {
        let numbers = [
            ("max_in_flight", tenant.max_in_flight),
            ("max_queue", tenant.max_queue),
            ("processes", tenant.processes),
        ];
        for (key, number) in numbers {
            if let Some(number) = number {
                self.set(key, number);
            }
        }
        if let Some(RateLimitConfig { per_second, burst, per: _ }) = tenant.rate_limit {
            self.set("rate_limit", format_args!("{{ per_second = {per_second}, burst = {burst} }}"));
        }
    }

    fn set_or_off(&mut self, key: &str, value: Option<String>) {
        match value {
            Some(value) => self.set(key, value),
            None => self.comment(format_args!("{key}: off")),
        }
    }

    fn life(&mut self, bulkhead: &BulkheadConfig) {
        let (restart, start, health) = (&bulkhead.restart, &bulkhead.start, &bulkhead.health);
        let restart = [
            format!("policy = \"{}\"", restart.policy.name()),
            format!("backoff = {}", duration(restart.backoff)),
            format!("backoff_max = {}", duration(restart.backoff_max)),
            format!("max = {}", restart.max),
            format!("within = {}", duration(restart.within)),
        ];
        self.set("restart", braced(&restart));
        let start = [
            format!("handshake = {}", duration(start.handshake)),
            format!("ready = {}", duration(start.ready)),
            "mode = \"spawn\"".to_owned(),
            "spares = 0".to_owned(),
        ];
        self.set("start", braced(&start));
        let health =
            [format!("heartbeat = {}", duration(health.heartbeat)), format!("missed = {}", health.missed)];
        self.set("health", braced(&health));
        let recycle = [
            bulkhead.recycle.jobs.map(|jobs| format!("jobs = {jobs}")),
            bulkhead.recycle.rss.map(|rss| format!("rss = {}", size(rss))),
            bulkhead.recycle.age.map(|age| format!("age = {}", duration(age))),
        ];
        let recycle: Vec<_> = recycle.into_iter().flatten().collect();
        self.set("recycle", braced(&recycle));
    }
}

fn braced(entries: &[String]) -> String {
    if entries.is_empty() { "{}".to_owned() } else { format!("{{ {} }}", entries.join(", ")) }
}

fn priority(priority: &PriorityConfig) -> String {
    format!("{{ critical_reserve = {} }}", units::share_literal(&priority.critical_reserve))
}

fn pressure(pressure: &PressureConfig) -> String {
    let (warn, reject) = (units::share_literal(&pressure.warn), units::share_literal(&pressure.reject));
    format!("{{ warn = {warn}, reject = {reject} }}")
}

fn rate_limit(limit: &RateLimitConfig) -> String {
    let RateLimitConfig { per_second, burst, per } = limit;
    format!("{{ per_second = {per_second}, burst = {burst}, per = \"{}\" }}", per.name())
}

fn tenants(tenants: &TenantsConfig) -> String {
    if let Some(isolation) = &tenants.isolation {
        let IsolationConfig { max_active, idle } = isolation;
        return format!("{{ isolate = true, max_active = {max_active}, idle = {} }}", duration(*idle));
    }
    let entries = [
        tenants.max_in_flight.map(|jobs| format!("max_in_flight = {jobs}")),
        tenants.max_queue.map(|jobs| format!("max_queue = {jobs}")),
    ];
    braced(&entries.into_iter().flatten().collect::<Vec<_>>())
}

fn retry(retry: &RetryConfig) -> String {
    format!("{{ attempts = {}, budget = {} }}", retry.attempts, units::share_literal(&retry.budget))
}

fn poison(poison: &PoisonConfig) -> String {
    format!("{{ crashes = {}, within = {} }}", poison.crashes, duration(poison.within))
}

fn breaker(breaker: &BreakerConfig) -> String {
    let mut entries = vec![
        format!("window = {}", duration(breaker.window)),
        format!("min_calls = {}", breaker.min_calls),
        format!("failure_rate = {}", units::share_literal(&breaker.failure_rate)),
    ];
    if let Some(slow_call) = breaker.slow_call {
        entries.push(format!("slow_call = {}", duration(slow_call)));
        entries.push(format!("slow_rate = {}", units::share_literal(&breaker.slow_rate)));
    }
    entries.push(format!("open_for = {}", duration(breaker.open_for)));
    entries.push(format!("probes = {}", breaker.probes));
    braced(&entries)
}

/// Where nothing is confined, the other keys would have no effect.
fn sandbox(sandbox: &SandboxConfig) -> String {
    let SandboxConfig { profile, network, read, write, tmp_bytes, user, allow, deny, best_effort } = sandbox;
    let mut entries = vec![format!("profile = \"{}\"", profile.name())];
    if *profile == Profile::None {
        return braced(&entries);
    }
    entries.push(format!("network = {network}"));
    entries.push(format!("read = {}", paths(read)));
    entries.push(format!("write = {}", paths(write)));
    entries.push(format!("tmp = {}", size(*tmp_bytes)));
    entries.extend(user.as_ref().map(|user| format!("user = {}", string(user.name()))));
    entries.push(format!("syscalls = {{ allow = {}, deny = {} }}", strings(allow), strings(deny)));
    let layers: Vec<_> = best_effort.iter().map(|layer| layer.name().to_owned()).collect();
    entries.push(format!("best_effort = {}", strings(&layers)));
    braced(&entries)
}

/// What `auto` comes to for whoever reads this, who is to start the supervisor.
fn whom(sandbox: &SandboxConfig, ids: WorkerIds) -> &'static str {
    match (ids != WorkerIds::None, sandbox.write.is_empty()) {
        (true, true) => "sandbox.user: auto, an id of each worker's own",
        (true, false) => {
            "sandbox.user: auto, one id that the bulkhead keeps, since `write` leaves files behind"
        }
        (false, _) => {
            "sandbox.user: shared, the workers have the supervisor's own user, since it may start no other"
        }
    }
}

fn cgroup(cgroup: &CgroupConfig) -> String {
    let entries = [
        cgroup.memory.map(|bytes| format!("memory = {}", size(bytes))),
        cgroup.pids.map(|pids| format!("pids = {pids}")),
        cgroup.cpu.map(|cores| format!("cpu = {cores}")),
    ];
    braced(&entries.into_iter().flatten().collect::<Vec<_>>())
}

fn rlimit(rlimit: &Rlimit) -> String {
    let value = match (rlimit.limit, rlimit.resource.measure()) {
        (None, _) => format!("\"{UNLIMITED}\""),
        (Some(bytes), Measure::Bytes) => size(bytes),
        (Some(seconds), Measure::Seconds) => duration(Duration::from_secs(seconds)),
        (Some(number), _) => number.to_string(),
    };
    format!("{} = {value}", rlimit.resource.name())
}

fn duration(duration: Duration) -> String {
    units::duration_literal(&duration)
}

fn size(bytes: u64) -> String {
    format!("\"{}\"", units::format_size(bytes))
}

fn path(path: &Path) -> String {
    string(&path.to_string_lossy())
}

fn paths(paths: &[PathBuf]) -> String {
    let paths: Vec<_> = paths.iter().map(|each| path(each)).collect();
    format!("[{}]", paths.join(", "))
}

/// A bare key where that is possible, else a quoted one.
fn key(name: &str) -> String {
    let bare =
        !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'));
    if bare { name.to_owned() } else { string(name) }
}

fn strings(texts: &[String]) -> String {
    let texts: Vec<_> = texts.iter().map(|text| string(text)).collect();
    format!("[{}]", texts.join(", "))
}

/// A basic string of TOML.
fn string(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            c if c.is_control() => quoted.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// A comment ends with its line.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
