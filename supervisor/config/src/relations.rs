//! Converts the contents of the configuration file into validated values: adds defaults, resolves paths, and checks all
//! rules that span several keys. Violations are reported at the value in the bulkhead's table, or otherwise at the
//! value in `[defaults]`.

mod access;
pub(crate) mod admission;
mod confinement;
mod environment;
mod exec;
mod fallback;
mod http;
mod start;
mod tenants;
mod times;

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::diagnostics::{Problems, nearest, shown, shown_key};
use super::file::{RawAccess, RawBulkhead, RawFile, RawSupervisor};
use super::keys::exec::Files;
use super::keys::lifecycle::RestartKeys;
use super::keys::tenants::RawTenant;
use super::reader::{Arguments, Field, Given, PresentKey};
use super::resolved::{Resolved, report_position, report_position_of};
use super::sources::{Source, Sources};
use super::table::ByRows as _;
use super::values::ValueError;
use super::{
    BulkheadConfig, Config, ProcessEnv, Program, Restart, SupervisorConfig, defaults, programs, units,
};

/// Minimum value of `max_pooled` in bytes, unless the value is 0. This is enough for one memory file of the smallest
/// size for payloads and another for results.
const POOLED_MIN: u64 = 512 * 1024;

/// Maximum number of names to list in a message.
const LISTED_MAX: usize = 10;

/// Checker for rules that involve several keys or the operating system. Collects the problems.
pub(super) struct Checker<'c> {
    pub(super) sources: &'c Sources,
    pub(super) process_env: &'c ProcessEnv,
    pub(super) problems: &'c mut Problems,
}

impl<'c> Checker<'c> {
    /// Checks a configuration against all rules. The result is valid only if no problems were reported.
    pub(super) fn check(&mut self, raw: RawFile) -> Config {
        let payload = raw.supervisor.max_payload.resolved();
        let access = self.access(&raw.access, &raw.names);
        let has_access = access.iter().any(|entry| entry.who.token_file().is_none());
        let supervisor = self.supervisor(&raw.supervisor, &payload, has_access);
        if self.process_env.is_embedded {
            self.reject_socket_keys(&raw.supervisor, &raw.access);
        } else {
            self.check_tokens(&raw.supervisor, &raw.access, &access);
        }
        let bulkheads =
            raw.bulkheads.iter().map(|bulkhead| self.bulkhead(bulkhead, &payload, &raw)).collect();
        let path = self.sources.main().absolute();
        let fragments = self.sources.fragments().iter().map(Source::absolute).collect();
        Config { path, fragments, supervisor, access, bulkheads }
    }

    /// Returns the folder against which relative paths at this position in the configuration are resolved.
    fn folder(&self, span: &Range<usize>) -> &'c Path {
        &self.sources.at(span.start).folder
    }

    fn report_error(&mut self, span: Range<usize>, error: ValueError) {
        self.problems.report(span, error.message, error.help);
    }

    fn supervisor(
        &mut self,
        raw: &RawSupervisor,
        payload: &Resolved<u64>,
        has_access: bool,
    ) -> SupervisorConfig {
        let (socket, admin) = self.sockets(raw);
        let buffered = raw.max_buffered.resolved();
        if buffered.value < payload.value
            && let Some(position) = report_position(&buffered, payload)
        {
            let (small, large) = (units::format_size(buffered.value), units::format_size(payload.value));
            self.problems.report(
                position,
                format!(
                    "`max_buffered` ({}) is below `max_payload` ({}), so a job of the maximum size could \
                     never wait",
                    buffered.with_origin(&small),
                    payload.with_origin(&large)
                ),
                format!("write `max_buffered = \"{large}\"` or more"),
            );
        }
        let pooled = raw.max_pooled.resolved();
        if (1..POOLED_MIN).contains(&pooled.value)
            && let Some(position) = report_position_of(&[&pooled])
        {
            let size = pooled.with_origin(units::format_size(pooled.value));
            self.problems.report(
                position,
                format!("`max_pooled` ({size}) is too small for the memory files of a payload and a result"),
                format!(
                    "write `max_pooled = \"{}\"` or more, or `max_pooled = 0` to disable memory files",
                    units::format_size(POOLED_MIN)
                ),
            );
        }
        let (socket_mode, folder_mode) = access::modes(&raw.socket_mode, has_access);
        SupervisorConfig {
            socket,
            socket_mode,
            folder_mode,
            admin,
            http: self.http(raw),
            jobs_http: self.jobs_http(raw),
            jobs_http_max: raw.jobs_http_max.value(),
            drain_notice: raw.drain_notice.value(),
            drain_timeout: raw.drain_timeout.value(),
            max_clients: raw.max_clients.value(),
            max_payload: payload.value,
            max_buffered: buffered.value,
            max_pooled: pooled.value,
            crash_dir: self.crash_dir(&raw.crash_dir),
            crash_keep: raw.crash_keep.value(),
            crash_payloads: raw.crash_payloads.value(),
            crash_symbols: self.paths("crash_symbols", &raw.crash_symbols, programs::present),
            tenant_labels: raw.tenant_labels.value(),
            worker_uids: raw.worker_uids.value(),
        }
    }

    /// Rejects keys that configure sockets or their clients, because an embedded supervisor has no sockets.
    fn reject_socket_keys(&mut self, raw: &RawSupervisor, access: &[RawAccess]) {
        fn span<T>(field: &Field<T>) -> Option<Range<usize>> {
            field.given().map(|given| given.span.clone())
        }
        let given = [
            ("socket", span(&raw.socket)),
            ("socket_mode", span(&raw.socket_mode)),
            ("admin", span(&raw.admin)),
            ("http", span(&raw.http)),
            ("http_token_file", span(&raw.http_token_file)),
            ("jobs_http", span(&raw.jobs_http)),
            ("jobs_http_max", span(&raw.jobs_http_max)),
            ("drain_notice", span(&raw.drain_notice)),
            ("[[access]]", access.first().map(|entry| entry.heading.clone())),
        ];
        for (key, span) in given.into_iter().filter_map(|(key, span)| Some((key, span?))) {
            let message = format!("an embedded supervisor has no sockets, so `{key}` would have no effect");
            self.problems.report(
                span,
                message,
                format!("remove `{key}`, or run bulkhead-supervisor with this file"),
            );
        }
    }

    fn sockets(&mut self, raw: &RawSupervisor) -> (PathBuf, PathBuf) {
        if self.process_env.is_embedded {
            return (PathBuf::new(), PathBuf::new());
        }
        let socket = match &raw.socket {
            Field::Given(given) => {
                self.socket("socket", &given.span, programs::resolve(self.folder(&given.span), &given.value))
            }
            Field::Invalid => None,
            Field::Absent => match self.process_env.default_socket() {
                Some(path) => self.socket("socket", &raw.heading, path),
                None => {
                    self.problems.report(
                        raw.heading.clone(),
                        "there is no default path for the jobs socket: XDG_RUNTIME_DIR is not set, and the user is \
                         not root",
                        "set `socket` in [supervisor], as in `socket = \"/tmp/bulkhead/jobs.sock\"`",
                    );
                    None
                }
            },
        };
        let admin = match (&raw.admin, &socket) {
            (Field::Given(given), _) => {
                self.socket("admin", &given.span, programs::resolve(self.folder(&given.span), &given.value))
            }
            (Field::Absent, Some(socket)) => {
                let position = raw.socket.given().map_or(&raw.heading, |given| &given.span);
                self.socket("admin", position, socket.with_file_name(defaults::ADMIN_NAME))
            }
            _ => None,
        };
        if let (Some(socket), Some(admin)) = (&socket, &admin)
            && programs::is_same_file(socket, admin)
        {
            let position = raw.admin.given().or(raw.socket.given()).map_or(&raw.heading, |given| &given.span);
            self.problems.report(
                position.clone(),
                format!("`socket` and `admin` have the same path: {}", socket.display()),
                "set different paths, or remove `admin` to use the default path",
            );
        }
        (socket.unwrap_or_default(), admin.unwrap_or_default())
    }

    fn socket(&mut self, label: &str, span: &Range<usize>, path: PathBuf) -> Option<PathBuf> {
        self.ok_or_report(span, programs::socket(label, &path)).map(|()| path)
    }

    fn bulkhead(&mut self, raw: &RawBulkhead, payload: &Resolved<u64>, file: &RawFile) -> BulkheadConfig {
        let program = self.program(raw);
        self.check_argument_bytes(raw);
        let deadline = raw.deadline.resolved();
        let deadline_max = raw.deadline_max.resolved(deadline.value);
        let longest = self.check_deadlines(raw, &deadline, &deadline_max);
        let run_limit = self.run_limit(raw, &longest);
        self.check_target(raw, &longest);
        let lookahead = self.lookahead(raw, &program);
        let queue = raw.max_queue.resolved();
        self.check_permits(&Permits::of_bulkhead(raw));
        self.check_adaptive(&raw.adaptive, &Permits::of_bulkhead(raw));
        let max_payload = self.below_supervisor("max_payload", &raw.max_payload, payload);
        let max_result = self.below_supervisor("max_result", &raw.max_result, payload);
        let runs_programs = raw.exec.given().is_some();
        let bulkhead = BulkheadConfig {
            cwd: self.cwd(raw),
            name: raw.name.clone(),
            program,
            env: environment::texts(&raw.env),
            env_files: self.env_files(raw),
            processes: raw.processes.value(),
            max_in_flight: raw.max_in_flight.value(),
            max_queue: queue.value,
            queue_timeout: raw.queue_timeout.value(),
            run_limit,
            deadline: deadline.value,
            deadline_max: deadline_max.value,
            has_deadline_max: !raw.deadline_max.is_absent(),
            grace: raw.grace.value(),
            lookahead,
            max_payload,
            max_result,
            overflow: self.overflow(&raw.overflow, &queue),
            fallback: self.fallback(raw, &file.names),
            priority: self.priority(&raw.priority),
            pressure: self.pressure(&raw.pressure, &queue),
            has_own_pressure: raw.pressure.is_own(),
            rate_limit: self.rate_limit(&raw.rate_limit),
            tenants: self.tenants(&raw.tenants),
            tenant: self.tenant(raw),
            breaker: self.breaker(&raw.breaker),
            retry: raw.retry.checked_if_present(),
            poison: raw.poison.checked_if_present(),
            adaptive: self.adaptive(&raw.adaptive),
            restart: self.restart(&raw.restart),
            start: raw.start.checked(),
            health: raw.health.checked(),
            recycle: raw.recycle.checked(),
            rlimits: raw.rlimits.checked(),
            sandbox: self.sandbox(&raw.sandbox, runs_programs),
            cgroup: raw.cgroup.checked_if_present(),
            output_grace: runs_programs.then(|| raw.output_grace.value_or(defaults::OUTPUT_GRACE)),
            exit_status: runs_programs.then(|| self.exit_status(&raw.exit_status)),
            files: raw.files.checked_if_present().filter(|files| runs_programs && *files != Files::default()),
        };
        self.check_workers(raw, &bulkhead);
        self.check_exec(raw, &bulkhead);
        self.check_start_mode(raw, &bulkhead);
        bulkhead
    }

    /// Checks that exactly one of `command`, `library` and `exec` is set, and that the program or library
    /// exists.
    fn program(&mut self, raw: &RawBulkhead) -> Program {
        let name = &raw.name;
        self.check_one_of(
            &raw.heading,
            [
                raw.command.present_key("command"),
                raw.library.present_key("library"),
                raw.exec.present_key("exec"),
            ],
            ValueError::new(
                format!("bulkhead `{name}` has no program to run"),
                "add `command = [\"./worker\"]`, `library = \"./libworker.so\"` or `exec = [\"program\"]`",
            ),
            |several| {
                ValueError::new(
                    format!("bulkhead `{name}` has {several}, but a bulkhead can run only one program"),
                    "keep only one key, and add a [bulkhead.NAME] section for each other program",
                )
            },
        );
        if let Some(entry) = raw.entry.given()
            && raw.library.is_absent()
        {
            self.problems.report(
                entry.span.clone(),
                "`entry` needs `library` because `entry` names a function of the library",
                "add `library = \"./libworker.so\"`, or remove `entry`",
            );
        }
        let command = raw.command.given().map(|given| self.arguments("command", &given.value));
        let exec = raw.exec.given().map(|given| self.arguments("exec", &given.value));
        let library = raw.library.given().map(|given| self.library(given));
        match (command, library, exec) {
            (Some((argv, path)), _, _) => Program::Command { argv, path },
            (None, _, Some((argv, path))) => Program::Exec { argv, path },
            (None, library, None) => {
                Program::Library { path: library.unwrap_or_default(), entry: raw.entry.value().into_owned() }
            }
        }
    }

    /// Reports an error unless exactly one of the given keys is set. If several keys are set, the error is reported at
    /// the last of them. If none is set, it is reported at the table's heading.
    fn check_one_of<const N: usize>(
        &mut self,
        heading: &Range<usize>,
        keys: [Option<PresentKey>; N],
        none: ValueError,
        several: impl FnOnce(&str) -> ValueError,
    ) {
        let written: Vec<PresentKey> = keys.into_iter().flatten().collect();
        match written.as_slice() {
            [] => self.report_error(heading.clone(), none),
            [_] => {}
            written => {
                let names =
                    written.iter().map(|(name, _)| format!("`{name}`")).collect::<Vec<_>>().join(" and ");
                let positions = written.iter().filter_map(|(_, position)| position.as_ref());
                let last = positions.max_by_key(|position| position.start).unwrap_or(heading);
                self.report_error(last.clone(), several(&names));
            }
        }
    }

    /// Returns the value of a successful result. If `found` is an error, reports the error at `position` and returns
    /// `None`.
    fn ok_or_report<T>(&mut self, position: &Range<usize>, found: Result<T, ValueError>) -> Option<T> {
        found.map_err(|error| self.report_error(position.clone(), error)).ok()
    }

    /// Returns the help text for an unknown bulkhead name. Suggests the most similar name in `names`. If no name is
    /// similar, lists all names, unless there are too many.
    fn suggest_name(name: &str, names: &[&str], which: &str) -> String {
        match nearest(name, names.iter().copied()) {
            Some(nearest) => format!("did you mean `{}`?", shown(nearest)),
            None if !names.is_empty() && names.len() <= LISTED_MAX => {
                let names = names.iter().map(|name| shown(name)).collect::<Vec<_>>().join(", ");
                format!("{which}: {names}")
            }
            None => "write the name of a bulkhead that this configuration file defines".to_owned(),
        }
    }

    fn arguments(&mut self, key: &str, arguments: &Arguments) -> (Vec<String>, PathBuf) {
        let argv: Vec<String> = arguments.iter().map(|argument| argument.value.clone()).collect();
        let Some(name) = arguments.first() else { return (argv, PathBuf::new()) };
        let label = format!("{key}[0]");
        let search_path = self.process_env.search_path.as_deref();
        let path = programs::program(&label, &name.value, self.folder(&name.span), search_path);
        (argv, self.ok_or_report(&name.span, path).unwrap_or_default())
    }

    fn library(&mut self, given: &Given<String>) -> PathBuf {
        let path = programs::resolve(self.folder(&given.span), &given.value);
        self.ok_or_report(&given.span, programs::library("library", &path, self.folder(&given.span)));
        path
    }

    fn cwd(&mut self, raw: &RawBulkhead) -> PathBuf {
        let Some(given) = raw.cwd.given() else { return self.folder(&raw.heading).to_owned() };
        let path = programs::resolve(self.folder(&given.span), &given.value);
        self.ok_or_report(&given.span, programs::working_folder("cwd", &path, self.folder(&given.span)));
        path
    }

    fn crash_dir(&mut self, crash_dir: &Field<String>) -> Option<PathBuf> {
        let given = crash_dir.given()?;
        let path = programs::resolve(self.folder(&given.span), &given.value);
        self.ok_or_report(&given.span, programs::future_folder("crash_dir", &path));
        Some(path)
    }

    /// Reports strings that occur more than once in an array.
    fn check_unique(&mut self, label: &str, strings: &[Given<String>]) {
        for (index, string) in strings.iter().enumerate() {
            if strings[..index].iter().any(|before| before.value == string.value) {
                let message = format!("`{label}` contains `{}` twice", shown(&string.value));
                self.problems.report(string.span.clone(), message, "remove one");
            }
        }
    }

    /// Reports an error if `lower` is greater than `upper`. `literal` formats a value as TOML.
    fn ordered<T: PartialOrd>(
        &mut self,
        lower: (&str, &Resolved<T>),
        upper: (&str, &Resolved<T>),
        literal: impl Fn(&T) -> String,
    ) {
        if lower.1.value <= upper.1.value {
            return;
        }
        let Some(position) = report_position(lower.1, upper.1) else { return };
        let (low, high) = (literal(&lower.1.value), literal(&upper.1.value));
        self.problems.report(
            position,
            format!(
                "`{}` ({}) exceeds `{}` ({})",
                lower.0,
                lower.1.with_origin(low.trim_matches('"')),
                upper.0,
                upper.1.with_origin(high.trim_matches('"'))
            ),
            format!(
                "set `{}` to at least {low}, or `{}` to at most {high}",
                key_name(upper.0),
                key_name(lower.0)
            ),
        );
    }

    fn check_permits(&mut self, permits: &Permits) {
        let Permits {
            processes: (processes_name, processes),
            in_flight: (in_flight_name, in_flight),
            queue: (queue_name, queue),
        } = permits;
        if in_flight.value == 0
            && queue.value > 0
            && let Some(position) = report_position(in_flight, queue)
        {
            self.problems.report(
                position,
                format!(
                    "`{in_flight_name}` ({}) conflicts with the queue (`{queue_name}` is {}): queued jobs would never \
                     run",
                    in_flight.with_origin(0),
                    queue.with_origin(queue.value)
                ),
                "set `max_in_flight` to at least 1, or set `max_queue` to 0 to reject every job immediately",
            );
        }
        if u64::from(processes.value) * u64::from(in_flight.value) > defaults::PERMITS_CEILING
            && let Some(position) = report_position(processes, in_flight)
        {
            self.problems.report(
                position,
                format!(
                    "`{processes_name}` ({}) × `{in_flight_name}` ({}) exceeds {}",
                    processes.with_origin(processes.value),
                    in_flight.with_origin(in_flight.value),
                    defaults::PERMITS_CEILING
                ),
                format!(
                    "with this number of processes, write `max_in_flight = {}` or less",
                    defaults::PERMITS_CEILING / u64::from(processes.value.max(1))
                ),
            );
        }
    }

    fn below_supervisor(&mut self, name: &str, field: &Field<u64>, payload: &Resolved<u64>) -> u64 {
        let resolved = field.resolved(payload.value);
        if resolved.value > payload.value
            && let Some(position) = report_position(&resolved, payload)
        {
            // The error is reported at the bulkhead's value, even if the file also sets the supervisor's value.
            let position = field.given().map_or(position, |given| given.span.clone());
            let (given, max) = (units::format_size(resolved.value), units::format_size(payload.value));
            self.problems.report(
                position,
                format!(
                    "`{name}` ({given}) exceeds the supervisor's `max_payload` ({})",
                    payload.with_origin(&max)
                ),
                format!(
                    "set `{name}` to at most \"{max}\", or `max_payload` in [supervisor] to at least \
                     \"{given}\""
                ),
            );
        }
        resolved.value
    }

    fn restart(&mut self, raw: &RestartKeys) -> Restart {
        let backoff = raw.backoff.resolved();
        let backoff_max = raw.backoff_max.resolved();
        self.ordered(
            ("restart.backoff", &backoff),
            ("restart.backoff_max", &backoff_max),
            units::duration_literal,
        );
        raw.checked()
    }
}

/// Limits on processes, jobs in flight and queued jobs for one set of workers. Each limit includes the name of its key,
/// for use in messages.
struct Permits {
    processes: (String, Resolved<u32>),
    in_flight: (String, Resolved<u32>),
    queue: (String, Resolved<u32>),
}

impl Permits {
    fn of_bulkhead(raw: &RawBulkhead) -> Self {
        Self {
            processes: ("processes".to_owned(), raw.processes.resolved()),
            in_flight: ("max_in_flight".to_owned(), raw.max_in_flight.resolved()),
            queue: ("max_queue".to_owned(), raw.max_queue.resolved()),
        }
    }

    /// Returns the limits for an isolated tenant. Limits that the tenant's table does not set are taken from the
    /// bulkhead.
    fn of_tenant(tenant: &RawTenant, raw: &RawBulkhead) -> Self {
        let bulkhead = Self::of_bulkhead(raw);
        let own = |name: &str, field: &Field<u32>, inherited| match field.is_absent() {
            true => inherited,
            false => (format!("tenant.{}.{name}", shown_key(&tenant.name)), field.resolved(0)),
        };
        Self {
            processes: own("processes", &tenant.keys.processes, bulkhead.processes),
            in_flight: own("max_in_flight", &tenant.keys.max_in_flight, bulkhead.in_flight),
            queue: own("max_queue", &tenant.keys.max_queue, bulkhead.queue),
        }
    }
}

/// Returns the key name, which is the last part of a dotted path.
fn key_name(label: &str) -> &str {
    label.rsplit('.').next().unwrap_or(label)
}
