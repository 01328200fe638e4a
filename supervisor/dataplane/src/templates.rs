//! Templates (`start.mode = "fork"`): processes that fork the workers of a compartment. Policy does not know about
//! templates. A worker that policy orders waits here until the template is ready. If the template ends first, the
//! start of the worker fails.
//!
//! A template is started when a worker is ordered and no template exists. The template is replaced when the program
//! of workers changes, or when many of the forked workers have died by a signal. In the latter case, an attacker may
//! have guessed the addresses that the workers share.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bulkhead_keeper::{Exit, TemplateWord};
use bulkhead_plane::confinement::WorkerIdentity;
use bulkhead_plane::notices::WorkerOutput;
use bulkhead_plane::program::Program;
use bulkhead_policy::{Death, Event, Time, WorkerId};
use rustix::pipe::{PipeFlags, pipe_with};

use super::keeper_link::WorkerOrder;
use super::links::Output;
use super::slab::CompartmentIndex;
use super::{DataPlane, Incoming};

/// Number of workers that died by a signal after which their template is replaced. The workers share addresses and
/// stack canaries.
const SIGNAL_DEATHS_MAX: u32 = 20;

#[derive(Default)]
pub(super) struct Templates {
    by_spawn: HashMap<u64, Template>,
    /// Templates that fork workers, by compartment.
    current: HashMap<CompartmentIndex, u64>,
    /// User ids of templates that have ended, until the descendants have ended as well.
    leaving: HashMap<u64, u32>,
}

struct Template {
    /// The compartment may be gone before the template, which then has no more workers to fork.
    compartment: CompartmentIndex,
    bulkhead: Arc<str>,
    /// Maximum time until the template is ready, and maximum length of an extension.
    ready: Duration,
    program: Arc<Program>,
    stage: Stage,
    /// User id of the template, if the template has a separate user id.
    id: Option<u32>,
    output: Option<Output>,
    pid: Option<u32>,
    /// Workers that wait for the template, with slots.
    waiting: Vec<(WorkerId, u32)>,
    /// Last status message.
    last_status: Option<String>,
    /// Number of forked workers that died by a signal.
    signal_deaths: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Ordered or initialising.
    Starting {
        until: Time,
    },
    Ready,
    /// Not ready in time.
    TimedOut,
}

impl Templates {
    /// Returns the template that forks workers for a compartment.
    fn of(&mut self, compartment: CompartmentIndex) -> Option<(u64, &mut Template)> {
        let spawn = *self.current.get(&compartment)?;
        self.by_spawn.get_mut(&spawn).map(|template| (spawn, template))
    }

    /// Removes a compartment's template from service. The template forks no more workers.
    fn retire(&mut self, compartment: CompartmentIndex) -> Option<u64> {
        self.current.remove(&compartment)
    }
}

impl DataPlane {
    /// Returns the template that can fork a worker now. If none is ready, starts a template if necessary and lets the
    /// worker wait.
    pub(super) fn template_for(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        slot: u32,
    ) -> io::Result<Option<u64>> {
        let program = self.owner(compartment).program.clone();
        if let Some((spawn, template)) = self.templates.of(compartment)
            && Arc::ptr_eq(&template.program, &program)
        {
            if template.stage == Stage::Ready {
                return Ok(Some(spawn));
            }
            template.waiting.push((worker, slot));
            return Ok(None);
        }
        // Workers that wait for a template of the previous program wait for the new template instead.
        let mut waiting = self.end_template(compartment);
        waiting.push((worker, slot));
        self.links.spawned += 1;
        let spawn = self.links.spawned;
        let id = match program.sandbox().identity() {
            WorkerIdentity::Each => self.links.take_id()?,
            WorkerIdentity::Own | WorkerIdentity::One(_) => None,
        };
        let (stdout_read, stdout_write) = pipe_with(PipeFlags::CLOEXEC)?;
        let (stderr_read, stderr_write) = pipe_with(PipeFlags::CLOEXEC)?;
        let order = program.template_order(spawn, id);
        let keeper = self.keeper.serving();
        if let Err(error) = keeper.and_then(|it| it.spawn_template(&order, stdout_write, stderr_write)) {
            self.links.give_back(id);
            return Err(error);
        }
        self.ping_keeper();
        let ready = self.compartments[compartment].policy.limits().start.ready;
        let until = self.now + ready;
        let template = Template {
            compartment,
            bulkhead: self.owner(compartment).name.clone(),
            ready,
            program,
            stage: Stage::Starting { until },
            id,
            output: Some((stdout_read, stderr_read)),
            pid: None,
            waiting,
            last_status: None,
            signal_deaths: 0,
        };
        self.templates.by_spawn.insert(spawn, template);
        self.templates.current.insert(compartment, spawn);
        self.schedule_checks();
        Ok(None)
    }

    /// Ends the template of a compartment. Forked workers continue. Returns the workers that were waiting for the
    /// template.
    pub(super) fn end_template(&mut self, compartment: CompartmentIndex) -> Vec<(WorkerId, u32)> {
        let Some(spawn) = self.templates.retire(compartment) else { return Vec::new() };
        self.keeper.kill(spawn, self.now);
        self.schedule_checks();
        let template = self.templates.by_spawn.get_mut(&spawn);
        template.map(|template| std::mem::take(&mut template.waiting)).unwrap_or_default()
    }

    /// Ends the template of a compartment, and orders the waiting workers again.
    pub(super) fn replace_template(&mut self, compartment: CompartmentIndex) {
        for (worker, slot) in self.end_template(compartment) {
            self.keeper.queue_worker(WorkerOrder { compartment, worker, slot });
        }
    }

    /// Removes a worker that waits for a template. Returns the reason for the failed start if the worker was waiting.
    pub(super) fn cancel_fork(&mut self, compartment: CompartmentIndex, worker: WorkerId) -> Option<String> {
        let of = |template: &&mut Template| template.compartment == compartment;
        let templates = self.templates.by_spawn.values_mut().filter(of);
        for template in templates {
            if let Some(at) = template.waiting.iter().position(|(waiting, _)| *waiting == worker) {
                template.waiting.remove(at);
                let last_status = template
                    .last_status
                    .as_deref()
                    .map(|last_status| format!(": {last_status}"))
                    .unwrap_or_default();
                return Some(format!("the template was not ready in time{last_status}"));
            }
        }
        None
    }

    // Reports.

    /// Handles the start of a template's process. Returns false if `spawn` is not a template.
    pub(super) fn template_spawned(&mut self, spawn: u64, pid: u32) -> bool {
        let Some(template) = self.templates.by_spawn.get_mut(&spawn) else { return false };
        template.pid = Some(pid);
        if matches!(template.stage, Stage::Starting { .. }) {
            template.stage = Stage::Starting { until: self.now + template.ready };
        }
        self.forward_template_outputs();
        self.schedule_checks();
        true
    }

    /// Handles the failed start of a template. Returns false if `spawn` is not a template.
    pub(super) fn template_failed(&mut self, spawn: u64, message: &str) -> bool {
        let Some(template) = self.take_template(spawn) else { return false };
        self.links.give_back(template.id);
        self.fail_waiting_workers(template.compartment, template.waiting, message);
        true
    }

    /// Handles the end of a template's process. Returns false if `spawn` is not a template.
    pub(super) fn template_ended(&mut self, spawn: u64, exit: Option<Exit>) -> bool {
        let Some(template) = self.templates.by_spawn.get(&spawn) else { return false };
        let how = match exit {
            _ if template.stage == Stage::TimedOut => "was not ready within `start.ready`".to_owned(),
            Some(exit) => format!("ended: {}", self.death(spawn, exit)),
            None => "ended with the keeper".to_owned(),
        };
        let last_status =
            template.last_status.as_deref().map(|last_status| format!(": {last_status}")).unwrap_or_default();
        let message = format!("the template of {} {how}{last_status}", template.program.describe());
        let Some(template) = self.take_template(spawn) else { return true };
        if exit.is_some() {
            self.templates.leaving.extend(template.id.map(|id| (spawn, id)));
        } else {
            self.links.give_back(template.id);
        }
        self.fail_waiting_workers(template.compartment, template.waiting, &message);
        true
    }

    /// Handles the end of a template and all descendants.
    pub(super) fn template_reaped(&mut self, spawn: u64) {
        let id = self.templates.leaving.remove(&spawn);
        self.links.give_back(id);
    }

    /// Ends a template whose temporary folder, not counting those of its workers, is too large.
    pub(super) fn check_template_folder(&mut self, spawn: u64, bytes: u64) {
        let Some(template) = self.templates.by_spawn.get_mut(&spawn) else { return };
        let is_too_much = template.program.sandbox().temporary_bytes().is_some_and(|most| bytes > most);
        if is_too_much {
            template.last_status = Some("the temporary folder holds more than `tmp` allows".to_owned());
            self.keeper.kill(spawn, self.now);
            self.schedule_checks();
        }
    }

    fn take_template(&mut self, spawn: u64) -> Option<Template> {
        let template = self.templates.by_spawn.remove(&spawn)?;
        if self.templates.current.get(&template.compartment) == Some(&spawn) {
            self.templates.retire(template.compartment);
        }
        Some(template)
    }

    fn fail_waiting_workers(
        &mut self,
        compartment: CompartmentIndex,
        waiting: Vec<(WorkerId, u32)>,
        message: &str,
    ) {
        for (worker, _) in waiting {
            let message = message.to_owned();
            self.apply(compartment, Event::SpawnFailed { worker, message }, Incoming::None);
        }
    }

    pub(super) fn handle_template_message(&mut self, spawn: u64, word: TemplateWord) {
        let now = self.now;
        let Some(template) = self.templates.by_spawn.get_mut(&spawn) else { return };
        let compartment = template.compartment;
        match word {
            TemplateWord::Status(text) | TemplateWord::Refused(text) => template.last_status = Some(text),
            TemplateWord::Extend(more) => {
                if let Stage::Starting { until } = &mut template.stage {
                    *until = (*until).max(now + more.min(template.ready));
                }
            }
            TemplateWord::Ready => {
                if matches!(template.stage, Stage::Starting { .. }) {
                    template.stage = Stage::Ready;
                    template.last_status = None;
                }
                let waiting = std::mem::take(&mut template.waiting);
                for (worker, slot) in waiting {
                    self.keeper.queue_worker(WorkerOrder { compartment, worker, slot });
                }
            }
        }
    }

    /// Handles the death of a worker that this template has forked.
    pub(super) fn count_forked_death(&mut self, compartment: CompartmentIndex, template: u64, death: Death) {
        let Some(found) = self.templates.by_spawn.get_mut(&template) else { return };
        if matches!(death, Death::Signal(_)) {
            found.signal_deaths += 1;
        }
        if found.signal_deaths >= SIGNAL_DEATHS_MAX
            && self.templates.current.get(&compartment) == Some(&template)
        {
            self.replace_template(compartment);
        }
    }

    /// Kills templates that are not ready in time.
    pub(super) fn check_templates(&mut self) {
        self.forward_template_outputs();
        let now = self.now;
        let mut is_any_starting = false;
        let mut late = Vec::new();
        for (&spawn, template) in &mut self.templates.by_spawn {
            if let Stage::Starting { until } = template.stage {
                is_any_starting = true;
                if until <= now {
                    template.stage = Stage::TimedOut;
                    late.push(spawn);
                }
            }
        }
        late.into_iter().for_each(|spawn| self.keeper.kill(spawn, now));
        if is_any_starting {
            self.schedule_checks();
        }
    }

    fn forward_template_outputs(&mut self) {
        let spawns: Vec<u64> = self.templates.by_spawn.keys().copied().collect();
        for spawn in spawns {
            let Some(template) = self.templates.by_spawn.get_mut(&spawn) else { continue };
            let Some(pid) = template.pid else { continue };
            let Some((stdout, stderr)): Option<(OwnedFd, OwnedFd)> = template.output.take() else { continue };
            let bulkhead = template.bulkhead.clone();
            let output = WorkerOutput { bulkhead, pid, is_template: true, stdout, stderr };
            let offered = self.reporter.notices.output(output);
            if let Err(WorkerOutput { stdout, stderr, .. }) = offered {
                if let Some(template) = self.templates.by_spawn.get_mut(&spawn) {
                    template.output = Some((stdout, stderr));
                }
                self.schedule_checks();
            }
        }
    }

    /// Handles the end of all templates after the loss of the keeper.
    pub(super) fn end_all_templates(&mut self) {
        let spawns: Vec<u64> = self.templates.by_spawn.keys().copied().collect();
        for spawn in spawns {
            self.template_ended(spawn, None);
        }
        let leaving: Vec<u64> = self.templates.leaving.keys().copied().collect();
        leaving.into_iter().for_each(|spawn| self.template_reaped(spawn));
    }
}
