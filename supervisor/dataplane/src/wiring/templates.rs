//! Performs the effects that `templates` requests. Orders templates and forked workers from the keeper, reports failed
//! starts to the compartments, and passes the templates' output to the control plane. `templates` decides when a
//! template is started, used or killed. The keeper forks the processes.

use std::io;

use bulkhead_plane::confinement::WorkerIdentity;
use bulkhead_plane::notices::WorkerOutput;
use bulkhead_policy::{Event, Time, WorkerId};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::keeper_link::WorkerOrder;
use crate::slab::CompartmentIndex;
use crate::templates::{Effect, Fork, TemplateOrder, Templates};
use crate::{DataPlane, Incoming};

impl DataPlane {
    fn perform_template_effects(&mut self) {
        while let Some(effect) = self.templates.next_effect() {
            match effect {
                Effect::Kill(spawn) => self.keeper.kill(spawn, self.now),
                Effect::Retire(spawn) => self.keeper.kill(self.links.retire_template(spawn), self.now),
                Effect::OrderWorker(compartment, worker, slot) => {
                    self.keeper.queue_worker(WorkerOrder { compartment, worker, slot });
                }
                Effect::FailSpawn(compartment, worker, message) => {
                    self.apply(compartment, Event::SpawnFailed { worker, message }, Incoming::None);
                }
                Effect::ReleaseId(id) => self.links.give_back(Some(id)),
            }
        }
    }

    /// Returns a template that can fork the worker now. If no template is ready, queues the worker until one is, and
    /// starts a template if the compartment has none.
    pub(crate) fn template_for(
        &mut self,
        index: CompartmentIndex,
        worker: WorkerId,
        slot: u32,
    ) -> io::Result<Option<u64>> {
        let compartment = &self.compartments[index];
        let owner = self.bulkheads.owner(compartment);
        let (program, bulkhead) = (owner.program.clone(), owner.name.clone());
        let ready = compartment.policy.limits().start.ready;
        match self.templates.fork(index, &program, (worker, slot)) {
            Fork::From(template) => return Ok(Some(template)),
            Fork::Waits => return Ok(None),
            Fork::NoTemplate => {}
        }
        let spawn = self.links.next_spawn();
        let (stdout_read, stdout_write) = pipe_with(PipeFlags::CLOEXEC)?;
        let (stderr_read, stderr_write) = pipe_with(PipeFlags::CLOEXEC)?;
        // Takes the UID as the last step before the order, so that the UID has to be returned only if sending the order
        // fails.
        let id = match program.sandbox().identity() {
            WorkerIdentity::Each => self.links.take_id()?,
            WorkerIdentity::Own | WorkerIdentity::One(_) => None,
        };
        let order = program.template_order(spawn, id);
        let keeper = self.keeper.serving();
        if let Err(error) = keeper.and_then(|it| it.spawn_template(&order, stdout_write, stderr_write)) {
            self.links.give_back(id);
            return Err(error);
        }
        self.keeper.ping(self.now);
        // Workers that were waiting for a template of the previous program now wait for the new template. If the new
        // template could not be ordered, they continue to wait for the old one.
        let mut waiting = self.update_templates(|templates, _| templates.end(index));
        waiting.push((worker, slot));
        let output = Some((stdout_read, stderr_read));
        let order = TemplateOrder { compartment: index, bulkhead, ready, program, id, output };
        self.templates.add(self.now, spawn, order, waiting);
        Ok(None)
    }

    /// Calls `update` to change the templates, and then performs the resulting effects.
    pub(crate) fn update_templates<T>(&mut self, update: impl FnOnce(&mut Templates, Time) -> T) -> T {
        let result = update(&mut self.templates, self.now);
        self.perform_template_effects();
        result
    }

    /// Kills templates that did not become ready in time.
    pub(crate) fn check_templates(&mut self) {
        self.update_templates(Templates::check_deadlines);
        self.forward_template_outputs();
    }

    /// Passes the templates' output to the control plane.
    pub(crate) fn forward_template_outputs(&mut self) {
        for (spawn, output) in self.templates.take_outputs() {
            if let Err(WorkerOutput { stdout, stderr, .. }) = self.reporter.output(output) {
                self.templates.keep_output(spawn, (stdout, stderr));
            }
        }
    }
}
