//! What a bulkhead runs, from the configuration's words to an order for the keeper.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bulkhead_policy::{Limits, TenantLimits};
use bulkhead_shared::worker_protocol::LINK_VARIABLE;

use crate::bounds;
use crate::confinement::{Sandbox, SandboxSupport};
use bulkhead_config::{self as config, BulkheadConfig, Resource};
use bulkhead_keeper::{Rlimit, SpawnOrder};

/// Tells a worker that it is a template.
const TEMPLATE: &str = "BULKHEAD_TEMPLATE=1";

/// The descriptor under which a worker finds its link.
const LINK_DESCRIPTOR: i32 = 3;

/// A resolved program, ready to be started any number of times.
pub struct Program {
    path: String,
    arguments: Vec<String>,
    environment: Vec<String>,
    directory: String,
    rlimits: Vec<Rlimit>,
    sandbox: Sandbox,
    /// Whether each job is a program of its own.
    runs_programs: bool,
    /// Whether its workers are forked from a template.
    is_forked: bool,
    /// What the user named, for messages.
    subject: String,
}

impl Program {
    /// Resolves what `bulkhead` runs. `host` is the program behind `exec` and `library`.
    pub fn new(bulkhead: &BulkheadConfig, host: Option<&Path>, support: &SandboxSupport) -> Self {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let named = match &bulkhead.program {
            config::Program::Command { path, .. }
            | config::Program::Library { path, .. }
            | config::Program::Exec { path, .. } => path.clone(),
        };
        let programs =
            host.filter(|_| needs_host(bulkhead)).map(Path::to_path_buf).into_iter().chain([named]);
        let sandbox = Sandbox::settle(bulkhead, programs.collect(), support);
        let host = host.map_or_else(|| HOST.to_owned(), text);
        let bounds = bounds::rlimits(bulkhead, &sandbox);
        let mut rlimits = kernel_limits(&bounds);
        let (path, arguments, subject) = match &bulkhead.program {
            config::Program::Command { argv, path } => (text(path), argv.clone(), text(path)),
            config::Program::Library { path, entry } => {
                let arguments = ["bulkhead-worker", "library", "--entry", entry, "--", &text(path)];
                (host, arguments.map(str::to_owned).to_vec(), text(path))
            }
            config::Program::Exec { argv, path } => {
                // Limits of an `exec` bulkhead are each program's own, so the host sets them.
                rlimits.retain(|limit| limit.resource == Resource::Core.number());
                let mut arguments = vec!["bulkhead-worker".to_owned(), "exec".to_owned()];
                for rlimit in bounds.iter().filter(|rlimit| rlimit.resource != Resource::Core) {
                    let value = rlimit.limit.map_or_else(|| "unlimited".to_owned(), |n| n.to_string());
                    arguments.push("--rlimit".to_owned());
                    arguments.push(format!("{}={value}", rlimit.resource.name()));
                }
                arguments.extend(meaning_of_end(bulkhead));
                arguments.push("--".to_owned());
                arguments.push(text(path));
                arguments.extend(argv.iter().skip(1).cloned());
                (host, arguments, text(path))
            }
        };
        let mut environment: Vec<String> =
            bulkhead.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        environment.push(format!("{LINK_VARIABLE}={LINK_DESCRIPTOR}"));
        let runs_programs = matches!(bulkhead.program, config::Program::Exec { .. });
        let directory = text(&bulkhead.cwd);
        let is_forked = bulkhead.start.mode == config::StartMode::Fork;
        Self { path, arguments, environment, directory, rlimits, sandbox, runs_programs, is_forked, subject }
    }

    /// Whether each job is a program of its own.
    pub fn runs_programs(&self) -> bool {
        self.runs_programs
    }

    /// Whether its workers are forked from a template.
    pub fn is_forked(&self) -> bool {
        self.is_forked
    }

    /// The order for a template that forks workers.
    pub fn template_order(&self, worker: u64, id: Option<u32>) -> SpawnOrder<'_> {
        let mut order = self.order(worker, id);
        order.environment.push(TEMPLATE);
        SpawnOrder { is_template: true, ..order }
    }

    /// The order that starts it once, with the user id that it has if each worker has its own.
    pub fn order(&self, worker: u64, id: Option<u32>) -> SpawnOrder<'_> {
        SpawnOrder {
            worker,
            program: &self.path,
            arguments: self.arguments.iter().map(String::as_str).collect(),
            environment: self.environment.iter().map(String::as_str).collect(),
            directory: &self.directory,
            rlimits: self.rlimits.clone(),
            confinement: self.sandbox.order(id),
            is_template: false,
        }
    }

    /// Logs what an operator should know of its sandbox. Not for the data plane.
    pub fn log_warnings(&self, bulkhead: &str) {
        for remark in self.sandbox.remarks() {
            tracing::warn!(bulkhead, "{remark}");
        }
    }

    /// How its workers are confined.
    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// What it is, for messages.
    pub fn describe(&self) -> &str {
        &self.subject
    }
}

/// The host's arguments about the end of a program.
fn meaning_of_end(bulkhead: &BulkheadConfig) -> Vec<String> {
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

/// No file fits in there, and unlike 0 it keeps the kernel from handing a dump to a program
/// (`kernel.core_pattern` with `|`).
const NO_DUMP: u64 = 1;

/// Hard equals soft, so that a worker cannot raise what it was given; but for processor time, where
/// the second that lies between makes the kernel name the cause (SIGXCPU) before it kills.
fn kernel_limits(rlimits: &[config::Rlimit]) -> Vec<Rlimit> {
    rlimits
        .iter()
        .map(|rlimit| {
            let soft = match rlimit.resource {
                Resource::Core => NO_DUMP,
                _ => rlimit.limit.unwrap_or(u64::MAX),
            };
            let hard = if rlimit.resource == Resource::Cpu { soft.saturating_add(1) } else { soft };
            Rlimit { resource: rlimit.resource.number(), soft, hard }
        })
        .collect()
}

/// The name of the host's program, which is installed beside the supervisor's own.
const HOST: &str = "bulkhead-worker";

/// The host for C libraries and plain programs is missing.
#[derive(Debug, thiserror::Error)]
#[error(
    "failed to find the program bulkhead-worker, which runs the `exec` and `library` of bulkhead '{0}': \
     install it beside bulkhead-supervisor, or in PATH; in an application, name it with `Builder::host`"
)]
pub struct NoHost(String);

/// Finds the host: beside this program, or else in `PATH`.
pub fn find_host() -> Option<PathBuf> {
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.join(HOST)));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path).map(|folder| folder.join(HOST));
    beside.into_iter().chain(in_path).find(|candidate| candidate.is_file())
}

/// The host, where it is found; it must be if a bulkhead needs it.
pub fn require_host(config: &config::Config) -> Result<Option<PathBuf>, NoHost> {
    let host = find_host();
    match config.bulkheads.iter().find(|bulkhead| needs_host(bulkhead)) {
        Some(needy) if host.is_none() => Err(NoHost(needy.name.clone())),
        _ => Ok(host),
    }
}

/// Whether a bulkhead needs the host.
pub fn needs_host(bulkhead: &BulkheadConfig) -> bool {
    matches!(bulkhead.program, config::Program::Library { .. } | config::Program::Exec { .. })
}

/// The numbers that policy decides by; where tenants are kept apart, for one of them.
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
        jobs_end_alone: matches!(bulkhead.program, config::Program::Exec { .. }),
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

/// How tenants share. Those that are kept apart share nothing.
fn tenants(bulkhead: &BulkheadConfig, labels: &Arc<[String]>) -> TenantLimits {
    let is_shared = bulkhead.isolation().is_none();
    let shares = bulkhead.tenants.as_ref().filter(|_| is_shared);
    let own = bulkhead.tenant.iter().filter(|_| is_shared);
    TenantLimits {
        max_in_flight: shares.and_then(|tenants| tenants.max_in_flight),
        max_queue: shares.and_then(|tenants| tenants.max_queue),
        own: own.map(|(name, numbers)| (name.clone(), numbers.of_share())).collect(),
        labelled: labels.clone(),
    }
}
