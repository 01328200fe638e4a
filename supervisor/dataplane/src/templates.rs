//! Templates (`start.mode = "fork"`): processes from which a compartment's workers are forked. Policy does not know
//! about templates. A worker that policy starts waits here until the template is ready. If the template exits before it
//! is ready, the worker's start fails.
//!
//! A template is started when a worker needs one. It is replaced when an operator restarts the bulkhead, when workers
//! must run another program, or when many forked workers have been killed by a signal. In the last case, an attacker
//! might be guessing addresses, which are the same in all forked workers.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bulkhead_keeper::TemplateReport;
use bulkhead_plane::notices::WorkerOutput;
use bulkhead_plane::program::Program;
use bulkhead_policy::{Death, Time, WorkerId};

use super::links::Output;
use super::slab::CompartmentIndex;

/// A template is replaced once this many of its forked workers have been killed by a signal. The new template has
/// different memory addresses and stack canaries, which its workers share.
const SIGNAL_DEATHS_MAX: u32 = 20;

#[derive(Default)]
pub(super) struct Templates {
    by_spawn: HashMap<u64, Template>,
    /// Spawn numbers of the templates that can fork workers, by compartment.
    current: HashMap<CompartmentIndex, u64>,
    /// UIDs of templates that have exited but still have descendants, by spawn number.
    leaving: HashMap<u64, u32>,
    effects: VecDeque<Effect>,
    /// True if there might be a template that is starting, or output of a template that has not been passed to the
    /// control plane yet.
    needs_checks: bool,
}

struct Template {
    order: TemplateOrder,
    phase: Phase,
    pid: Option<u32>,
    /// Workers that are waiting for the template, each with its slot.
    waiting: Vec<(WorkerId, u32)>,
    /// Most recent status message from the template.
    last_status: Option<String>,
    /// Number of workers that were forked from the template and killed by a signal.
    signal_deaths: u32,
}

/// Data about a template that the keeper has been ordered to start.
pub(super) struct TemplateOrder {
    /// Compartment to which the template belongs. The template forks no workers after the compartment has been
    /// removed.
    pub(super) compartment: CompartmentIndex,
    pub(super) bulkhead: Arc<str>,
    /// Maximum time for the template to become ready. Also the maximum length of each extension that the template
    /// requests.
    pub(super) ready: Duration,
    pub(super) program: Arc<Program>,
    /// The template's separate UID, or `None` if templates have no separate UIDs.
    pub(super) id: Option<u32>,
    pub(super) output: Option<Output>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The template is being started or initialized.
    Starting {
        until: Time,
    },
    Ready,
    /// The template was not ready in time.
    TimedOut,
}

/// An action that the caller must perform. The caller performs all actions in order, immediately after the call that
/// produced them.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Effect {
    Kill(u64),
    /// Kills a template that did not fail. The workers that it is forking must be started again.
    Retire(u64),
    /// Starts a worker that was waiting for a template.
    OrderWorker(CompartmentIndex, WorkerId, u32),
    /// Reports to policy that a worker could not be started.
    FailSpawn(CompartmentIndex, WorkerId, String),
    /// Returns a UID to the UID pool.
    ReleaseId(u32),
}

/// Result of a request for a forked worker.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fork {
    /// The template with this spawn number can fork the worker now.
    From(u64),
    /// The worker must wait for a template that is starting.
    Waits,
    /// The compartment has no template, so one must be started first.
    NoTemplate,
}

impl Templates {
    pub(super) fn next_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Returns true if [`Self::check_deadlines`] must be called regularly.
    pub(super) fn needs_checks(&self) -> bool {
        self.needs_checks
    }

    // Forking.

    /// Requests a template that can fork a worker for this program.
    pub(super) fn fork(
        &mut self,
        compartment: CompartmentIndex,
        program: &Arc<Program>,
        (worker, slot): (WorkerId, u32),
    ) -> Fork {
        let Some(&spawn) = self.current.get(&compartment) else { return Fork::NoTemplate };
        match self.by_spawn.get_mut(&spawn) {
            Some(template) if !Arc::ptr_eq(&template.order.program, program) => Fork::NoTemplate,
            Some(Template { phase: Phase::Ready, .. }) => Fork::From(spawn),
            Some(template) => {
                template.waiting.push((worker, slot));
                Fork::Waits
            }
            None => Fork::NoTemplate,
        }
    }

    /// Adds a template that the keeper has been ordered to start. `waiting` contains the workers that are waiting for
    /// the template.
    pub(super) fn add(&mut self, now: Time, spawn: u64, order: TemplateOrder, waiting: Vec<(WorkerId, u32)>) {
        self.current.insert(order.compartment, spawn);
        let phase = Phase::Starting { until: now + order.ready };
        let template = Template { order, phase, pid: None, waiting, last_status: None, signal_deaths: 0 };
        self.by_spawn.insert(spawn, template);
        self.needs_checks = true;
    }

    /// Kills a compartment's template, but not the workers that were forked from it. Returns the workers that were
    /// waiting for the template.
    pub(super) fn end(&mut self, compartment: CompartmentIndex) -> Vec<(WorkerId, u32)> {
        let Some(spawn) = self.current.remove(&compartment) else { return Vec::new() };
        self.effects.push_back(Effect::Retire(spawn));
        let template = self.by_spawn.get_mut(&spawn);
        template.map(|template| std::mem::take(&mut template.waiting)).unwrap_or_default()
    }

    /// Kills a compartment's template, and requeues the workers that were waiting for the template.
    pub(super) fn replace(&mut self, compartment: CompartmentIndex) {
        let waiting = self.end(compartment);
        self.order_workers(compartment, waiting);
    }

    /// Removes a worker from the list of workers that are waiting for a template. If the worker was in the list,
    /// returns the reason why its start failed.
    pub(super) fn cancel(&mut self, compartment: CompartmentIndex, worker: WorkerId) -> Option<String> {
        let templates = self.by_spawn.values_mut();
        templates.filter(|template| template.order.compartment == compartment).find_map(|template| {
            let at = template.waiting.iter().position(|(waiting, _)| *waiting == worker)?;
            template.waiting.remove(at);
            Some(format!("the template was not ready in time{}", template.status_suffix()))
        })
    }

    fn order_workers(&mut self, compartment: CompartmentIndex, workers: Vec<(WorkerId, u32)>) {
        let orders = workers.into_iter();
        self.effects.extend(orders.map(|(worker, slot)| Effect::OrderWorker(compartment, worker, slot)));
    }

    // Reports.

    /// Handles the start of a template's process. Returns false if `spawn` does not belong to a template.
    pub(super) fn spawned(&mut self, now: Time, spawn: u64, pid: u32) -> bool {
        let Some(template) = self.by_spawn.get_mut(&spawn) else { return false };
        template.pid = Some(pid);
        if matches!(template.phase, Phase::Starting { .. }) {
            template.phase = Phase::Starting { until: now + template.order.ready };
        }
        self.needs_checks = true;
        true
    }

    /// Handles a report that a template could not be started. Returns false if `spawn` does not belong to a template.
    pub(super) fn failed(&mut self, spawn: u64, message: &str) -> bool {
        let Some(template) = self.remove(spawn) else { return false };
        self.effects.extend(template.order.id.map(Effect::ReleaseId));
        self.fail_waiting_workers(template, message);
        true
    }

    /// Handles the exit of a template's process. `death` is `None` if the template died with the keeper.
    /// Returns false if `spawn` does not belong to a template.
    pub(super) fn ended(&mut self, spawn: u64, death: Option<Death>) -> bool {
        let Some(template) = self.remove(spawn) else { return false };
        let how = match death {
            _ if template.phase == Phase::TimedOut => "was not ready within `start.ready`".to_owned(),
            Some(death) => format!("ended: {death}"),
            None => "died together with the keeper".to_owned(),
        };
        let program = template.order.program.path_for_messages();
        let message = format!("the template of {program} {how}{}", template.status_suffix());
        if let Some(id) = template.order.id {
            match death {
                Some(_) => drop(self.leaving.insert(spawn, id)),
                None => self.effects.push_back(Effect::ReleaseId(id)),
            }
        }
        self.fail_waiting_workers(template, &message);
        true
    }

    /// Handles a report that a template and all its descendants are gone.
    pub(super) fn reaped(&mut self, spawn: u64) {
        let id = self.leaving.remove(&spawn);
        self.effects.extend(id.map(Effect::ReleaseId));
    }

    /// Handles the loss of the keeper. All templates died with the keeper.
    pub(super) fn keeper_lost(&mut self) {
        let mut spawns: Vec<u64> = self.by_spawn.keys().copied().collect();
        spawns.sort_unstable();
        for spawn in spawns {
            self.ended(spawn, None);
        }
        self.effects.extend(self.leaving.drain().map(|(_, id)| Effect::ReleaseId(id)));
    }

    pub(super) fn message(&mut self, now: Time, spawn: u64, word: TemplateReport) {
        let Some(template) = self.by_spawn.get_mut(&spawn) else { return };
        match word {
            TemplateReport::Status(text) | TemplateReport::Refused(text) => template.last_status = Some(text),
            TemplateReport::Extend(more) => {
                if let Phase::Starting { until } = &mut template.phase {
                    *until = (*until).max(now + more.min(template.order.ready));
                }
            }
            TemplateReport::Ready => {
                if matches!(template.phase, Phase::Starting { .. }) {
                    template.phase = Phase::Ready;
                    template.last_status = None;
                }
                let (compartment, waiting) =
                    (template.order.compartment, std::mem::take(&mut template.waiting));
                self.order_workers(compartment, waiting);
            }
        }
    }

    /// Kills a template if its temporary folder is too large. `bytes` is the folder's size, not including the
    /// folders of the template's workers.
    pub(super) fn check_temporary_folder(&mut self, spawn: u64, bytes: u64) {
        let Some(template) = self.by_spawn.get_mut(&spawn) else { return };
        if template.order.program.sandbox().temporary_bytes().is_some_and(|most| bytes > most) {
            template.last_status =
                Some("the temporary directory contains more than `sandbox.tmp` allows".to_owned());
            self.effects.push_back(Effect::Kill(spawn));
        }
    }

    /// Handles the death of a worker that was forked from a template.
    pub(super) fn forked_worker_died(&mut self, compartment: CompartmentIndex, spawn: u64, death: Death) {
        let Some(template) = self.by_spawn.get_mut(&spawn) else { return };
        template.signal_deaths += u32::from(matches!(death, Death::Signal(_)));
        if template.signal_deaths >= SIGNAL_DEATHS_MAX && self.current.get(&compartment) == Some(&spawn) {
            self.replace(compartment);
        }
    }

    fn remove(&mut self, spawn: u64) -> Option<Template> {
        let template = self.by_spawn.remove(&spawn)?;
        if self.current.get(&template.order.compartment) == Some(&spawn) {
            self.current.remove(&template.order.compartment);
        }
        Some(template)
    }

    fn fail_waiting_workers(&mut self, template: Template, message: &str) {
        let compartment = template.order.compartment;
        let fail = |(worker, _)| Effect::FailSpawn(compartment, worker, message.to_owned());
        self.effects.extend(template.waiting.into_iter().map(fail));
    }

    // Checks.

    /// Kills templates that were not ready in time.
    pub(super) fn check_deadlines(&mut self, now: Time) {
        let mut late = Vec::new();
        self.needs_checks = false;
        for (&spawn, template) in &mut self.by_spawn {
            let Phase::Starting { until } = template.phase else { continue };
            self.needs_checks = true;
            if until <= now {
                template.phase = Phase::TimedOut;
                late.push(spawn);
            }
        }
        late.sort_unstable();
        self.effects.extend(late.into_iter().map(Effect::Kill));
    }

    /// Removes and returns the output of each started template. Omits output that was already passed to the
    /// control plane.
    pub(super) fn take_outputs(&mut self) -> Vec<(u64, WorkerOutput)> {
        let outputs = self.by_spawn.iter_mut().filter_map(|(&spawn, template)| {
            let pid = template.pid?;
            let (stdout, stderr) = template.order.output.take()?;
            let bulkhead = template.order.bulkhead.clone();
            Some((spawn, WorkerOutput { bulkhead, pid, is_template: true, stdout, stderr }))
        });
        outputs.collect()
    }

    /// Puts a template's output back after it could not be passed to the control plane.
    pub(super) fn keep_output(&mut self, spawn: u64, output: Output) {
        if let Some(template) = self.by_spawn.get_mut(&spawn) {
            template.order.output = Some(output);
            self.needs_checks = true;
        }
    }
}

impl Template {
    /// Returns the last status message with a colon and a space in front, so that it can be appended to a sentence.
    fn status_suffix(&self) -> String {
        self.last_status.as_deref().map(|status| format!(": {status}")).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use bulkhead_config::Config;

    use bulkhead_plane::confinement::SandboxSupport;
    use bulkhead_plane::worker_ids::IdUse;

    use super::*;
    use crate::slab::SlabIndex;

    const READY: Duration = Duration::from_secs(5);

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    fn compartment() -> CompartmentIndex {
        CompartmentIndex::from_number(2)
    }

    fn worker(generation: u32) -> WorkerId {
        WorkerId { place: 0, generation }
    }

    fn program() -> Arc<Program> {
        let text = "[supervisor]\nsocket = \"jobs.sock\"\n[bulkhead.a]\ncommand = [\"/bin/true\"]\n";
        let config: Config = bulkhead_config::parse(text, std::path::Path::new("/workers.toml")).unwrap();
        let support = SandboxSupport::probe(&config, IdUse::Check);
        Arc::new(Program::new(&config.bulkheads[0], None, &support))
    }

    /// Returns a fixture in which template 10 has been starting since `now` and one worker is waiting for the
    /// template.
    fn starting(now: Time) -> (Templates, Arc<Program>) {
        let (mut templates, program) = (Templates::default(), program());
        assert_eq!(templates.fork(compartment(), &program, (worker(1), 0)), Fork::NoTemplate);
        let order = TemplateOrder {
            compartment: compartment(),
            bulkhead: "a".into(),
            ready: READY,
            program: program.clone(),
            id: Some(7),
            output: None,
        };
        templates.add(now, 10, order, vec![(worker(1), 0)]);
        (templates, program)
    }

    fn effects(templates: &mut Templates) -> Vec<Effect> {
        std::iter::from_fn(|| templates.next_effect()).collect()
    }

    #[test]
    fn starts_waiting_workers_when_template_is_ready() {
        let (mut templates, program) = starting(at(0));
        assert_eq!(templates.fork(compartment(), &program, (worker(2), 1)), Fork::Waits);
        assert!(templates.spawned(at(1), 10, 99) && !templates.spawned(at(1), 11, 99));
        templates.message(at(2), 10, TemplateReport::Ready);
        let order = |generation, slot| Effect::OrderWorker(compartment(), worker(generation), slot);
        assert_eq!(effects(&mut templates), [order(1, 0), order(2, 1)]);
        assert_eq!(templates.fork(compartment(), &program, (worker(3), 0)), Fork::From(10));
        templates.check_deadlines(at(60));
        assert!(effects(&mut templates).is_empty() && !templates.needs_checks());
    }

    #[test]
    fn kills_template_that_is_not_ready_in_time() {
        let (mut templates, _) = starting(at(0));
        templates.spawned(at(1), 10, 99);
        templates.message(at(4), 10, TemplateReport::Extend(Duration::from_secs(60)));
        templates.check_deadlines(at(8));
        assert!(effects(&mut templates).is_empty() && templates.needs_checks());
        templates.check_deadlines(at(9));
        assert_eq!(effects(&mut templates), [Effect::Kill(10)]);
        assert!(templates.ended(10, Some(Death::Signal(9))));
        let failed = effects(&mut templates);
        let [Effect::FailSpawn(_, failed, message)] = &failed[..] else { panic!("{failed:?}") };
        assert!(*failed == worker(1) && message.contains("not ready within"), "{message}");
        templates.reaped(10);
        assert_eq!(effects(&mut templates), [Effect::ReleaseId(7)]);
    }

    #[test]
    fn cancels_worker_that_is_waiting_for_a_template() {
        let (mut templates, _) = starting(at(0));
        templates.message(at(1), 10, TemplateReport::Status("loading".into()));
        let message = templates.cancel(compartment(), worker(1));
        assert_eq!(message.as_deref(), Some("the template was not ready in time: loading"));
        assert!(templates.cancel(compartment(), worker(1)).is_none());
    }

    #[test]
    fn replaces_template_after_many_deaths_by_signal() {
        let (mut templates, program) = starting(at(0));
        templates.message(at(1), 10, TemplateReport::Ready);
        effects(&mut templates);
        (1..SIGNAL_DEATHS_MAX).for_each(|_| {
            templates.forked_worker_died(compartment(), 10, Death::Signal(11));
        });
        templates.forked_worker_died(compartment(), 10, Death::Exit(1));
        assert!(effects(&mut templates).is_empty());
        templates.forked_worker_died(compartment(), 10, Death::Signal(11));
        assert_eq!(effects(&mut templates), [Effect::Retire(10)]);
        assert_eq!(templates.fork(compartment(), &program, (worker(2), 0)), Fork::NoTemplate);
    }

    #[test]
    fn releases_user_ids_of_templates_when_keeper_is_lost() {
        let (mut templates, _) = starting(at(0));
        templates.keeper_lost();
        let all = effects(&mut templates);
        assert_eq!(all.first(), Some(&Effect::ReleaseId(7)));
        assert!(matches!(&all[1], Effect::FailSpawn(..)) && all.len() == 2);
    }
}
