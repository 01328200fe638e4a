//! Checks the keys `exit_status`, `files` and `output_grace`, which apply only to `exec` programs. Also fills in the
//! default exit statuses, except for statuses that the file puts in another list. The host program in
//! `worker/src/host/exec.rs` applies the values when it runs a program.

use super::Checker;
use crate::Profile;
use crate::diagnostics::shown;
use crate::file::RawBulkhead;
use crate::keys::bulkhead::{BulkheadConfig, Program};
use crate::keys::exec::{ExitStatus, ExitStatusKeys};
use crate::reader::{Field, Origin};

/// Default exit statuses, from `sysexits.h`. EX_USAGE and EX_DATAERR mean that the caller is at fault. After
/// EX_TEMPFAIL, the job can be retried.
const CALLER: [u8; 2] = [64, 65];
const RETRYABLE: [u8; 1] = [75];

/// Maximum length of a file name in bytes (NAME_MAX).
const FILE_NAME_BYTES_MAX: usize = 255;

impl Checker<'_> {
    pub(super) fn exit_status(&mut self, raw: &ExitStatusKeys) -> ExitStatus {
        let lists = [("ok", &raw.ok), ("caller", &raw.caller), ("retryable", &raw.retryable)];
        let mut written: Vec<(u8, &str)> = Vec::new();
        for (name, given) in lists.into_iter().filter_map(|(name, field)| Some((name, field.given()?))) {
            for &status in &given.value {
                if let Some((_, before)) = written.iter().find(|(other, _)| *other == status) {
                    let message = format!("`exit_status` lists {status} in both `{before}` and `{name}`");
                    self.problems.report(
                        given.span.clone(),
                        message,
                        "remove the status from one of the two lists",
                    );
                }
                written.push((status, name));
            }
        }
        if let Some(given) = raw.ok.given().filter(|given| given.value.is_empty()) {
            let message = "`exit_status.ok` is empty, so no job could succeed";
            self.problems.report(given.span.clone(), message, "add a status, as in `ok = [0]`");
        }
        // A list that the file does not set has its default value, without the statuses that the file puts in another
        // list.
        let list = |field: &Field<Vec<u8>>, default: &[u8]| {
            field.value().unwrap_or_else(|| {
                let is_free = |status: &u8| written.iter().all(|(other, _)| other != status);
                default.iter().copied().filter(is_free).collect()
            })
        };
        let ok = list(&raw.ok, &[0]);
        if ok.is_empty() && raw.ok.given().is_none() {
            let other = lists.into_iter().find_map(|(name, field)| {
                let given = field.given()?;
                given.value.contains(&0).then_some((name, given))
            });
            if let Some((name, given)) = other {
                let message =
                    format!("`exit_status.{name}` contains 0 and `ok` is not set, so no job could succeed");
                self.problems.report(
                    given.span.clone(),
                    message,
                    "set `ok` to another status, as in `ok = [1]`",
                );
            }
        }
        ExitStatus { ok, caller: list(&raw.caller, &CALLER), retryable: list(&raw.retryable, &RETRYABLE) }
    }

    pub(super) fn check_exec(&mut self, raw: &RawBulkhead, bulkhead: &BulkheadConfig) {
        if !matches!(bulkhead.program, Program::Exec { .. }) {
            self.check_for_exec(raw, "output_grace", &raw.output_grace);
            self.check_for_exec(raw, "exit_status", &raw.exit_status.presence);
            self.check_for_exec(raw, "files", &raw.files.presence);
            return;
        }
        let files = [("input", &raw.files.input), ("output", &raw.files.output)];
        for (name, given) in files.iter().filter_map(|(name, field)| Some((name, field.given()?))) {
            let file = given.value.as_str();
            if file.contains('/') || matches!(file, "." | "..") || file.len() > FILE_NAME_BYTES_MAX {
                self.problems.report(
                    given.span.clone(),
                    format!(
                        "`files.{name}` must be the name of a file in the job's own directory, not `{}`",
                        shown(file)
                    ),
                    format!(
                        "write a name of at most {FILE_NAME_BYTES_MAX} bytes without `/`, as in `{name} = \
                         \"{name}.txt\"`"
                    ),
                );
            }
        }
        let Some(files) = files.iter().find_map(|(_, field)| field.given()) else {
            let are_absent = files.iter().all(|(_, field)| field.is_absent());
            if let Some(given) = raw.files.presence.given().filter(|_| are_absent) {
                let message = "`files` names neither `input` nor `output`";
                self.problems.report(
                    given.span.clone(),
                    message,
                    "set `input` or `output`, or remove `files`",
                );
            }
            return;
        };
        if let Some(cwd) = raw.cwd.given().filter(|cwd| cwd.origin >= files.origin) {
            self.problems.report(
                cwd.span.clone(),
                "`cwd` and `files` cannot be combined: with `files`, each job's own directory is the working \
                 directory",
                "remove `cwd`, and use absolute paths for other files",
            );
        }
        let sandbox = &bulkhead.sandbox;
        if sandbox.profile != Profile::None && sandbox.tmp_bytes == 0 {
            let position = raw.sandbox.tmp.given().map_or(&files.span, |tmp| &tmp.span);
            self.problems.report(
                position.clone(),
                "`files` needs a temporary directory, but `sandbox.tmp` is 0",
                "write `tmp = \"64MiB\"` or more, so that a payload and a result fit",
            );
        }
    }

    /// Reports a key in the bulkhead's own table that has no effect without `exec`.
    fn check_for_exec<T>(&mut self, raw: &RawBulkhead, key: &str, field: &Field<T>) {
        if let Some(given) = field.given().filter(|given| given.origin == Origin::Own) {
            self.problems.report(
                given.span.clone(),
                format!("`{key}` has no effect: bulkhead `{}` has no `exec`", raw.name),
                format!("remove `{key}`, or run a program with `exec = [\"program\"]`"),
            );
        }
    }
}
