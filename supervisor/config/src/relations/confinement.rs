//! Checks the `sandbox` table, and converts it to validated values. Rejects keys that have no effect with the
//! configured profile, and paths, users and system calls that do not exist. The `plane` crate checks later whether this
//! machine supports the configured layers.

use std::path::{Path, PathBuf};

use super::Checker;
use bulkhead_shared::Vocabulary as _;

use crate::diagnostics::shown;
use crate::keys::confinement::SandboxKeys;
use crate::reader::{Arguments, Field, Origin};
use crate::resolved::Resolved;
use crate::system_calls::{NEEDED, NEEDED_FOR_EXEC, is_system_call};
use crate::values::ValueError;
use crate::{Layer, Network, Profile, SandboxConfig, SandboxUser};
use crate::{identities, programs};

impl Checker<'_> {
    pub(super) fn sandbox(&mut self, raw: &SandboxKeys, runs_programs: bool) -> SandboxConfig {
        let profile = raw.profile.resolved();
        let sandbox = SandboxConfig {
            profile: profile.value,
            network: raw.network.value(),
            read: self.paths("sandbox.read", &raw.read, programs::present),
            write: self.paths("sandbox.write", &raw.write, programs::writable),
            tmp_bytes: raw.tmp.value(),
            user: self.user(&raw.user),
            allow: self.system_calls("sandbox.syscalls.allow", &raw.syscalls.allow),
            deny: self.system_calls("sandbox.syscalls.deny", &raw.syscalls.deny),
            best_effort: self.layers(&raw.best_effort),
        };
        if profile.value == Profile::None {
            self.check_profile(raw, &profile);
            return no_confinement();
        }
        self.check_allowed_and_denied(raw);
        self.check_denied(raw, runs_programs);
        sandbox
    }

    /// Rejects keys that have no effect with the `none` profile.
    fn check_profile(&mut self, raw: &SandboxKeys, profile: &Resolved<Profile>) {
        self.check_confined("network", &raw.network, raw, profile);
        self.check_confined("read", &raw.read, raw, profile);
        self.check_confined("write", &raw.write, raw, profile);
        self.check_confined("tmp", &raw.tmp, raw, profile);
        // `user = "shared"` is allowed, because workers without a sandbox also have a user.
        if raw.user.given().is_none_or(|user| user.value != SandboxUser::SHARED) {
            self.check_confined("user", &raw.user, raw, profile);
        }
        self.check_confined("syscalls", &raw.syscalls.presence, raw, profile);
        self.check_confined("best_effort", &raw.best_effort, raw, profile);
    }

    /// Rejects a key that has no effect with `profile = "none"`. A key in `[defaults]` is accepted if the bulkhead's
    /// own table sets this profile.
    fn check_confined<T: Clone>(
        &mut self,
        name: &str,
        field: &Field<T>,
        raw: &SandboxKeys,
        profile: &Resolved<Profile>,
    ) {
        let Some(given) = field.given() else { return };
        let is_overridden = raw.profile.given().is_some_and(|profile| profile.origin > given.origin);
        if is_overridden || raw.profile.is_invalid() {
            return;
        }
        let elsewhere = match given.origin {
            Origin::Defaults => "; for a bulkhead without a sandbox, set `sandbox = { profile = \"none\" }`",
            Origin::Own | Origin::Tenant => "",
        };
        let (default, strict) = (Profile::Default.name(), Profile::Strict.name());
        self.problems.report(
            given.span.clone(),
            format!(
                "`sandbox.{name}` has no effect: `sandbox.profile` is {}",
                profile.with_origin(format_args!("\"{}\"", profile.value.name()))
            ),
            format!(
                "set `profile = \"{default}\"` or `profile = \"{strict}\"`, or remove `{name}`{elsewhere}"
            ),
        );
    }

    pub(super) fn paths(
        &mut self,
        label: &str,
        field: &Field<Arguments>,
        check: impl Fn(&str, &Path, &Path) -> Result<(), ValueError>,
    ) -> Vec<PathBuf> {
        let Some(given) = field.given() else { return Vec::new() };
        self.check_unique(label, &given.value);
        let mut paths = Vec::new();
        for text in &given.value {
            let folder = self.folder(&text.span);
            let path = programs::resolve(folder, &text.value);
            self.ok_or_report(&text.span, check(label, &path, folder));
            paths.push(path);
        }
        paths
    }

    fn user(&mut self, field: &Field<String>) -> Option<SandboxUser> {
        let given = field.given()?;
        if given.value == SandboxUser::AUTO {
            return Some(SandboxUser::Auto);
        }
        if given.value == SandboxUser::SHARED {
            return Some(SandboxUser::Shared);
        }
        if let Err(mut error) = identities::user("sandbox.user", &given.value) {
            error.help = format!(
                "write `user = \"{}\"` or `user = \"{}\"`, or {}",
                SandboxUser::AUTO,
                SandboxUser::SHARED,
                error.help
            );
            self.report_error(given.span.clone(), error);
        }
        Some(SandboxUser::Named(given.value.clone()))
    }

    fn system_calls(&mut self, label: &str, field: &Field<Arguments>) -> Vec<String> {
        let Some(given) = field.given() else { return Vec::new() };
        self.check_unique(label, &given.value);
        for name in given.value.iter().filter(|name| !is_system_call(&name.value)) {
            self.problems.report(
                name.span.clone(),
                format!(
                    "`{label}` contains `{}`, but there is no system call of that name",
                    shown(&name.value)
                ),
                "write a name from syscalls(2), as in \"mlock\"",
            );
        }
        given.value.iter().map(|name| name.value.clone()).collect()
    }

    fn layers(&mut self, field: &Field<Arguments>) -> Vec<Layer> {
        let Some(given) = field.given() else { return Vec::new() };
        self.check_unique("sandbox.best_effort", &given.value);
        given.value.iter().filter_map(|word| Layer::from_word(&word.value)).collect()
    }

    fn check_allowed_and_denied(&mut self, raw: &SandboxKeys) {
        let (Some(allow), Some(deny)) = (raw.syscalls.allow.given(), raw.syscalls.deny.given()) else {
            return;
        };
        for denied in &deny.value {
            let Some(allowed) = allow.value.iter().find(|allowed| allowed.value == denied.value) else {
                continue;
            };
            let nearest = if allowed.origin > denied.origin { allowed } else { denied };
            self.problems.report(
                nearest.span.clone(),
                format!("`sandbox.syscalls` both allows and denies `{}`", shown(&denied.value)),
                "remove the name from `allow` or `deny`",
            );
        }
    }

    /// Rejects a configuration that denies a system call that every worker needs, or that every `exec` worker needs.
    fn check_denied(&mut self, raw: &SandboxKeys, runs_programs: bool) {
        let Some(deny) = raw.syscalls.deny.given() else { return };
        for denied in &deny.value {
            let name = denied.value.as_str();
            let (user, help) = if NEEDED.contains(&name) {
                let help = "remove the name; with the \"strict\" profile, a worker drops execve automatically when \
                            it is ready";
                ("every worker needs to start", help)
            } else if runs_programs && NEEDED_FOR_EXEC.contains(&name) {
                ("the worker of an `exec` bulkhead needs for each job", "remove the name")
            } else {
                continue;
            };
            self.problems.report(
                denied.span.clone(),
                format!("`sandbox.syscalls.deny` contains `{name}`, which {user}"),
                help,
            );
        }
    }
}

fn no_confinement() -> SandboxConfig {
    SandboxConfig {
        profile: Profile::None,
        network: Network::None,
        read: Vec::new(),
        write: Vec::new(),
        tmp_bytes: 0,
        user: None,
        allow: Vec::new(),
        deny: Vec::new(),
        best_effort: Vec::new(),
    }
}
