//! Runs in the forked child, from the fork to the execution of the worker's program. Performs the steps in `steps.rs`
//! one after another, and reports the first failure to the keeper. If the worker gets a PID namespace, forks the worker
//! between the two tables of steps. The keeper has prepared all data before the fork.

use std::os::fd::AsFd;

use rustix::io::Errno;

use super::clone::clone;
use super::init;
use super::plan::Plan;
use super::progress::{self, StepError, StepFailure};
use super::steps::{self, NAMESPACE_STEPS, WORKER_STEPS};
use super::{FAILED_EXIT_CODE, exit};
use crate::protocol::confinement::Namespaces;

impl Plan<'_> {
    pub(super) fn run(&self) -> ! {
        // Closes the keeper's end of the socket. Otherwise, this process would wait forever if the keeper died before
        // the parent-death signal was set. SAFETY: the keeper's copy stays open, and nothing in this process uses this
        // copy.
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

    /// Executes all steps in a table. `first` is the number of the table's first step.
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

    /// Forks the worker from this process, which remains as the worker's parent and as the first process of the PID
    /// namespace.
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
