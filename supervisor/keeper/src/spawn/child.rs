//! The child, from the fork to the execution of the worker's program.

use std::ffi::c_char;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::process::Pid;

use super::forker::{OriginalSettings, clone};
use super::init;
use super::prepared::Prepared;
use super::progress::{self, StepError, StepFailure};
use super::steps::{self, NAMESPACE_STEPS, WORKER_STEPS};
use super::{FAILED_EXIT_CODE, exit};
use crate::protocol::confinement::{Identity, Layers, Namespaces};

/// Input of the steps. Borrows from the data prepared before the fork, which outlives it.
pub(super) struct Plan<'p> {
    pub(super) prepared: &'p Prepared,
    pub(super) arguments: Vec<*const c_char>,
    pub(super) environment: Vec<*const c_char>,
    pub(super) keeper: Pid,
    /// User and group of the keeper.
    pub(super) keeper_identity: Identity,
    pub(super) original: OriginalSettings,
}

impl Plan<'_> {
    pub(super) fn layers(&self) -> &Layers {
        &self.prepared.confinement.layers
    }

    /// Returns the namespaces that the fork creates. A user namespace can also be created later.
    pub(super) fn fork_namespaces(&self) -> Namespaces {
        let wanted = self.layers().namespaces;
        Namespaces { user: wanted.user && !self.prepared.confinement.makes_root_first(), ..wanted }
    }

    pub(super) fn run(&self) -> ! {
        // Otherwise this process would wait forever for a keeper that died before the parent-death signal was
        // set.
        // SAFETY: the keeper's copy stays open, and nothing in this process uses this one.
        unsafe { libc::close(self.prepared.keeper_end) };
        let namespaces = self.layers().namespaces;
        if namespaces.any() {
            self.run_steps(0, &NAMESPACE_STEPS);
        }
        if namespaces.pid {
            self.fork_worker();
        }
        self.run_steps(NAMESPACE_STEPS.len(), &WORKER_STEPS);
        exit(FAILED_EXIT_CODE)
    }

    /// Executes the steps of a table, whose first step has the number `first`.
    fn run_steps(&self, first: usize, table: &[(&str, steps::Step)]) {
        for (number, (_, step)) in table.iter().enumerate() {
            if let Err(error) = step(self) {
                self.fail((first + number) as u32, error);
            }
        }
    }

    fn fail(&self, step: u32, StepError { errno, detail }: StepError) -> ! {
        progress::report_failure(
            self.prepared.progress.as_fd(),
            &StepFailure { step, detail, errno: errno.raw_os_error() },
        );
        exit(FAILED_EXIT_CODE)
    }

    /// Forks the worker. This process stays as the first process of the pid namespace, and is the worker's
    /// parent.
    fn fork_worker(&self) {
        let failed = |step, errno: Errno| -> ! { self.fail(step, errno.into()) };
        let fork = || {
            clone(Namespaces::default(), None).unwrap_or_else(|errno| failed(steps::WORKER_FORK_STEP, errno))
        };
        if let Some(socket) = &self.prepared.init_socket {
            let children = init::template::open_children()
                .unwrap_or_else(|errno| failed(steps::TEMPLATE_INIT_STEP, errno));
            match fork() {
                0 => drop(children),
                template => init::template::run(template, socket, children),
            }
            return;
        }
        match (fork(), &self.prepared.status) {
            (0, _) => {}
            (worker, Some(status)) => init::worker::run(worker, status),
            (_, None) => exit(FAILED_EXIT_CODE),
        }
    }
}
