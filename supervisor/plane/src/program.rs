//! Resolves a bulkhead's program, and creates the orders to spawn its workers, templates and symbolizers. Also converts
//! the bulkhead's configuration to limits for policy, and finds the host program. The data plane sends most orders. The
//! keeper starts the processes.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bulkhead_policy::{Limits, TenantLimits};
use bulkhead_shared::worker_protocol::LINK_VARIABLE;

use crate::confinement::{Sandbox, SandboxSupport};
use crate::open_files::hard_limit;
use crate::rlimits;
use bulkhead_config::{self as config, BulkheadConfig, Resource};
use bulkhead_keeper::{Rlimit, SpawnOrder};

/// Environment variable that tells a worker program to act as a template.
const TEMPLATE: &str = "BULKHEAD_TEMPLATE=1";

/// Undocumented first command-line argument that makes the supervisor program run as a symbolizer.
pub const SYMBOLIZE_ARGUMENT: &str = "__symbolize";

/// Memory limit of a symbolizer, in bytes.
const SYMBOLIZER_BYTES: u64 = 1 << 30;

/// Environment variable that contains the descriptor number of a symbolizer's link.
const SYMBOLIZER_LINK: &str = "BULKHEAD_LINK_FD=3";

/// Descriptor number of a worker's link to the supervisor.
const LINK_DESCRIPTOR: i32 = 3;

/// A bulkhead's program with all paths resolved. Creates the spawn orders for the bulkhead's workers.
pub struct Program {
    path: String,
    arguments: Vec<String>,
    environment: Vec<String>,
    /// Names of additional environment variables, and paths of the files that contain their values.
    environment_files: Vec<(String, String)>,
    directory: String,
    rlimits: Vec<Rlimit>,
    sandbox: Sandbox,
    /// Confinement of a symbolizer that reads a worker's crash record.
    symbolizer_sandbox: Sandbox,
    /// True for an `exec` bulkhead, whose workers start a separate process for each job.
    runs_programs: bool,
    /// True if workers are forked from a template.
    is_forked: bool,
    /// Name of the configured program, as shown in messages.
    subject: String,
}

impl Program {
    /// Resolves the program of `bulkhead`. `host` is the host program, which runs `exec` and `library` programs.
    pub fn new(bulkhead: &BulkheadConfig, host: Option<&Path>, support: &SandboxSupport) -> Self {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let configured = match &bulkhead.program {
            config::Program::Command { path, .. }
            | config::Program::Library { path, .. }
            | config::Program::Exec { path, .. } => path.clone(),
        };
        let programs =
            host.filter(|_| needs_host(bulkhead)).map(Path::to_path_buf).into_iter().chain([configured]);
        let sandbox = Sandbox::resolve(bulkhead, programs.collect(), support);
        let symbolizer_sandbox = symbolizer_sandbox(bulkhead, &sandbox, support);
        let host = host.map_or_else(|| HOST.to_owned(), text);
        let worker_rlimits = rlimits::for_workers(bulkhead, &sandbox);
        let mut rlimits = kernel_limits(&worker_rlimits);
        let (path, arguments, subject) = match &bulkhead.program {
            config::Program::Command { argv, path } => (text(path), argv.clone(), text(path)),
            config::Program::Library { path, entry } => {
                let arguments = ["bulkhead-worker", "library", "--entry", entry, "--", &text(path)];
                (host, arguments.map(str::to_owned).to_vec(), text(path))
            }
            config::Program::Exec { argv, path } => {
                // In an `exec` bulkhead, the host applies the resource limits to each program that it starts. The limit
                // on core dumps applies to the host, too. A confined host gets three quarters of the supervisor's limit
                // on open files, so it needs the programs' limit if that is higher.
                let max = hard_limit();
                let is_for_host = |limit: &Rlimit| {
                    limit.resource == Resource::Core.number()
                        || limit.resource == Resource::Nofile.number()
                            && (max - max / 4..=max).contains(&limit.hard)
                };
                rlimits.retain(is_for_host);
                let mut arguments = vec!["bulkhead-worker".to_owned(), "exec".to_owned()];
                for rlimit in worker_rlimits.iter().filter(|rlimit| rlimit.resource != Resource::Core) {
                    let value = rlimit.limit.map_or_else(|| "unlimited".to_owned(), |n| n.to_string());
                    arguments.push("--rlimit".to_owned());
                    arguments.push(format!("{}={value}", rlimit.resource.name()));
                }
                arguments.extend(exit_and_file_options(bulkhead));
                arguments.push("--".to_owned());
                arguments.push(text(path));
                arguments.extend(argv.iter().skip(1).cloned());
                (host, arguments, text(path))
            }
        };
        let mut environment: Vec<String> =
            bulkhead.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        environment.push(format!("{LINK_VARIABLE}={LINK_DESCRIPTOR}"));
        let environment_files =
            bulkhead.env_files.iter().map(|(name, path)| (name.clone(), text(path))).collect();
        let runs_programs = matches!(bulkhead.program, config::Program::Exec { .. });
        let directory = text(&bulkhead.cwd);
        let is_forked = bulkhead.start.mode == config::StartMode::Fork;
        Self {
            path,
            arguments,
            environment,
            environment_files,
            directory,
            rlimits,
            sandbox,
            symbolizer_sandbox,
            runs_programs,
            is_forked,
            subject,
        }
    }

    /// Returns an order that tells the keeper to start a symbolizer for a dead worker. `program` is the supervisor's
    /// executable. `symbols` contains the folders in `crash_symbols`.
    pub fn symbolizer_order<'a>(
        &'a self,
        program: &'a str,
        symbols: &'a [String],
        worker: u64,
        id: Option<u32>,
    ) -> SpawnOrder<'a> {
        let mut confinement = self.symbolizer_sandbox.order(id);
        confinement.programs.push(program);
        confinement.read.extend(symbols.iter().map(String::as_str));
        let rlimits = [(Resource::Core, NO_DUMP_BYTES), (Resource::As, SYMBOLIZER_BYTES)];
        SpawnOrder {
            worker,
            program,
            arguments: ["bulkhead-symbolizer", SYMBOLIZE_ARGUMENT]
                .into_iter()
                .chain(symbols.iter().map(String::as_str))
                .collect(),
            environment: vec![SYMBOLIZER_LINK],
            environment_files: Vec::new(),
            directory: "/",
            rlimits: rlimits
                .map(|(resource, limit)| Rlimit { resource: resource.number(), soft: limit, hard: limit })
                .to_vec(),
            confinement,
            is_template: false,
        }
    }

    pub fn symbolizer_sandbox(&self) -> &Sandbox {
        &self.symbolizer_sandbox
    }

    /// Returns true for an `exec` bulkhead, whose workers start a separate process for each job.
    pub fn runs_programs(&self) -> bool {
        self.runs_programs
    }

    /// Returns true if workers are forked from a template.
    pub fn is_forked(&self) -> bool {
        self.is_forked
    }

    /// Returns an order that tells the keeper to start a template.
    pub fn template_order(&self, worker: u64, id: Option<u32>) -> SpawnOrder<'_> {
        let mut order = self.order(worker, id);
        order.environment.push(TEMPLATE);
        SpawnOrder { is_template: true, ..order }
    }

    /// Returns an order that tells the keeper to start one worker. `id` is the worker's UID if each worker has a
    /// separate UID.
    pub fn order(&self, worker: u64, id: Option<u32>) -> SpawnOrder<'_> {
        SpawnOrder {
            worker,
            program: &self.path,
            arguments: self.arguments.iter().map(String::as_str).collect(),
            environment: self.environment.iter().map(String::as_str).collect(),
            environment_files: self
                .environment_files
                .iter()
                .map(|(name, path)| (name.as_str(), path.as_str()))
                .collect(),
            directory: &self.directory,
            rlimits: self.rlimits.clone(),
            confinement: self.sandbox.order(id),
            is_template: false,
        }
    }

    /// Logs warnings about weaknesses in the confinement. Must not be called by the data plane, because the data plane
    /// never logs.
    pub fn log_warnings(&self, bulkhead: &str) {
        for warning in self.sandbox.warnings() {
            tracing::warn!(bulkhead, "{warning}");
        }
    }

    /// Returns the confinement of the workers.
    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// Returns the name of the configured program, as shown in messages.
    pub fn path_for_messages(&self) -> &str {
        &self.subject
    }
}

/// Resolves the confinement of a symbolizer. It equals the worker's confinement, but without write access or network
/// access, and with the `strict` profile if this machine supports that profile. Even if a manipulated crash record
/// compromises the symbolizer, the symbolizer has no rights that the worker did not have. Therefore, it gets no paths that
/// the worker could have redirected.
fn symbolizer_sandbox(bulkhead: &BulkheadConfig, worker: &Sandbox, support: &SandboxSupport) -> Sandbox {
    let resolve = |profile| {
        let mut bulkhead = bulkhead.clone();
        bulkhead.start.mode = config::StartMode::Spawn;
        let sandbox = &mut bulkhead.sandbox;
        sandbox.profile = profile;
        sandbox.network = config::Network::None;
        let written = std::mem::take(&mut sandbox.write);
        sandbox.read.extend(written.iter().cloned());
        (sandbox.allow, sandbox.deny) = (Vec::new(), Vec::new());
        Sandbox::resolve(&bulkhead, worker.programs(), support).without_paths_through(&written)
    };
    let strict = resolve(config::Profile::Strict);
    if strict.obstacle().is_none() { strict } else { resolve(bulkhead.sandbox.profile) }
}

/// Returns the command-line options that pass `output_grace`, `exit_status` and `files` to the host program.
fn exit_and_file_options(bulkhead: &BulkheadConfig) -> Vec<String> {
    let grace = bulkhead.output_grace.map(|grace| ("--output-grace-us", grace.as_micros().to_string()));
    let mut options = Vec::from_iter(grace);
    if let Some(config::ExitStatus { ok, caller, retryable }) = &bulkhead.exit_status {
        for (option, statuses) in [("--ok", ok), ("--caller", caller), ("--retryable", retryable)] {
            options.extend(statuses.iter().map(|status| (option, status.to_string())));
        }
    }
    if let Some(config::Files { input, output }) = &bulkhead.files {
        options.extend(input.iter().map(|name| ("--input", name.clone())));
        options.extend(output.iter().map(|name| ("--output", name.clone())));
    }
    options.into_iter().flat_map(|(option, value)| [option.to_owned(), value]).collect()
}

/// Size limit for core dumps, in bytes, which is too small for any dump. The limit is not 0, because the kernel would
/// then still pipe dumps to a program configured in `kernel.core_pattern`.
const NO_DUMP_BYTES: u64 = 1;

/// Converts resource limits to the form that the kernel needs. Hard limits equal soft limits, so that a worker cannot
/// raise them. The only exception is processor time, for which the hard limit is one second higher. The kernel then
/// sends SIGXCPU before SIGKILL, and SIGXCPU shows the cause of death.
fn kernel_limits(rlimits: &[config::Rlimit]) -> Vec<Rlimit> {
    rlimits
        .iter()
        .map(|rlimit| {
            let soft = match rlimit.resource {
                Resource::Core => NO_DUMP_BYTES,
                _ => rlimit.limit.unwrap_or(u64::MAX),
            };
            let hard = if rlimit.resource == Resource::Cpu { soft.saturating_add(1) } else { soft };
            Rlimit { resource: rlimit.resource.number(), soft, hard }
        })
        .collect()
}

/// File name of the host program, which is usually installed next to the supervisor.
const HOST: &str = "bulkhead-worker";

/// Error returned if `exec` or `library` is configured but the host program cannot be found.
#[derive(Debug, thiserror::Error)]
#[error(
    "failed to find {}, which runs `exec` and `library` for bulkhead '{bulkhead}': \
     install bulkhead-worker next to bulkhead-supervisor, or in PATH; in an application, set the path with \
     `Builder::host`",
    host.display()
)]
pub struct HostNotFound {
    host: PathBuf,
    bulkhead: String,
}

/// Looks for the host program next to the current executable and in `PATH`. Returns an absolute path, because the
/// keeper has a different working directory.
pub fn find_host() -> Option<PathBuf> {
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.join(HOST)));
    let path = std::env::var_os("PATH").unwrap_or_default();
    beside.into_iter().chain(hosts_in(&path)).find(|candidate| candidate.is_file())
}

/// Returns the absolute paths that the host program can have in the folders of `PATH`.
fn hosts_in(path: &OsStr) -> impl Iterator<Item = PathBuf> {
    std::env::split_paths(path).filter_map(|folder| std::path::absolute(folder.join(HOST)).ok())
}

/// Returns the path of the host program, which is `path` if it is set. Fails if the host program cannot be found and a
/// bulkhead needs it.
pub fn require_host(config: &config::Config, path: Option<PathBuf>) -> Result<Option<PathBuf>, HostNotFound> {
    let found = match &path {
        Some(path) => Some(path.clone()).filter(|path| path.is_file()),
        None => find_host(),
    };
    match config.bulkheads.iter().find(|bulkhead| needs_host(bulkhead)) {
        Some(bulkhead) if found.is_none() => {
            let host = path.unwrap_or_else(|| HOST.into());
            Err(HostNotFound { host, bulkhead: bulkhead.name.clone() })
        }
        _ => Ok(found),
    }
}

pub fn needs_host(bulkhead: &BulkheadConfig) -> bool {
    matches!(bulkhead.program, config::Program::Library { .. } | config::Program::Exec { .. })
}

/// Converts a bulkhead's configuration to limits for its state machine. With isolated tenants, the limits apply to each
/// tenant.
pub fn limits(bulkhead: &BulkheadConfig, labels: &Arc<[String]>) -> Limits {
    Limits {
        processes: bulkhead.processes,
        max_in_flight: bulkhead.max_in_flight,
        max_queue: bulkhead.max_queue,
        queue_timeout: bulkhead.queue_timeout,
        run_limit: bulkhead.run_limit,
        deadline: bulkhead.deadline,
        deadline_max: bulkhead.deadline_max,
        grace: bulkhead.grace,
        worker_ends_jobs: matches!(bulkhead.program, config::Program::Exec { .. }),
        lookahead: bulkhead.lookahead,
        restart: bulkhead.restart.clone(),
        start: bulkhead.start.clone(),
        health: bulkhead.health.clone(),
        recycle: bulkhead.recycle.clone(),
        critical_reserve: bulkhead.priority.as_ref().map_or(0.0, |priority| priority.critical_reserve),
        pressure: bulkhead.pressure.clone(),
        overflow: bulkhead.overflow,
        rate_limit: bulkhead.rate_limit,
        breaker: bulkhead.breaker.clone(),
        retry: bulkhead.retry.clone(),
        poison: bulkhead.poison.clone(),
        adaptive: bulkhead.adaptive.clone(),
        tenants: tenants(bulkhead, labels),
        idle: bulkhead.isolation().map(|isolation| isolation.idle),
    }
}

/// Returns the limits for tenants that share workers, or no limits if tenants are isolated.
fn tenants(bulkhead: &BulkheadConfig, labels: &Arc<[String]>) -> TenantLimits {
    let is_shared = bulkhead.isolation().is_none();
    let shares = bulkhead.tenants.as_ref().filter(|_| is_shared);
    let own = bulkhead.tenant.iter().filter(|_| is_shared);
    TenantLimits {
        max_in_flight: shares.and_then(|tenants| tenants.max_in_flight),
        max_queue: shares.and_then(|tenants| tenants.max_queue),
        overrides: own.map(|(name, numbers)| (name.clone(), numbers.of_share())).collect(),
        labelled: labels.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_program_is_found_by_absolute_path() {
        let own = std::env::current_dir().unwrap();
        let found: Vec<PathBuf> = hosts_in(OsStr::new("bin:/usr/bin:")).collect();
        assert_eq!(found, [own.join("bin").join(HOST), Path::new("/usr/bin").join(HOST), own.join(HOST)]);
    }
}
