//! Checks that each `[[access]]` entry names one user, group or token, names only existing bulkheads, and allows
//! something. Also converts names of users and groups to IDs, and chooses the mode of the jobs socket. `keys::access`
//! declares the keys, and `bulkhead_plane::access` enforces the permissions.

use super::Checker;
use crate::diagnostics::shown;
use crate::file::RawAccess;
use crate::keys::tenants::check_name as check_tenant_name;
use crate::reader::{Arguments, Field, Given};
use crate::table::WithDefault;
use crate::values::ValueError;
use crate::{AccessConfig, Who};
use crate::{defaults, identities};

/// Mode bits of a socket that allow users other than the supervisor's user to connect.
const OTHERS_CAN_CONNECT: u32 = 0o022;

/// Returns the modes of the jobs socket and of the socket's folder. If there are access rules, the default modes let
/// all users connect, because the rules decide which users are accepted.
pub(super) fn modes(socket_mode: &WithDefault<u32>, has_access: bool) -> (u32, u32) {
    let default_value = if has_access { defaults::SOCKET_MODE_WITH_ACCESS } else { socket_mode.default };
    let socket_mode = socket_mode.value_or(default_value);
    // The default mode of the folder would exclude users whom the access rules and the mode of the socket allow.
    let open = has_access && socket_mode & OTHERS_CAN_CONNECT != 0;
    (socket_mode, if open { defaults::FOLDER_MODE_WITH_ACCESS } else { defaults::FOLDER_MODE })
}

impl Checker<'_> {
    /// Checks all access rules. `names` contains the names of all bulkheads in the file.
    pub(super) fn access(&mut self, raw: &[RawAccess], names: &[String]) -> Vec<AccessConfig> {
        raw.iter()
            .map(|entry| AccessConfig {
                who: self.client(entry),
                role: entry.role.value(),
                bulkheads: self.access_bulkheads(&entry.bulkheads, names),
                tenants: self.access_tenants(&entry.tenants),
            })
            .collect()
    }

    /// Checks that exactly one of `uid`, `gid`, `user`, `group` and `token_file` is set.
    fn client(&mut self, raw: &RawAccess) -> Who {
        self.check_one_of(
            &raw.heading,
            [
                raw.uid.present_key("uid"),
                raw.gid.present_key("gid"),
                raw.user.present_key("user"),
                raw.group.present_key("group"),
                raw.token_file.present_key("token_file"),
            ],
            ValueError::new(
                "an `access` entry does not name a user, group or token",
                "add `uid = 1001`, `gid = 1001`, `user = \"www-data\"`, `group = \"www-data\"` or \
                 `token_file = \"/etc/bulkhead/jobs-token\"`",
            ),
            |several| {
                ValueError::new(
                    format!("an `access` entry has {several}, but must name a single user, group or token"),
                    "keep only one key, and add an [[access]] entry for each other user, group or token",
                )
            },
        );
        let uid = raw.uid.given().map(|uid| uid.value);
        let gid = raw.gid.given().map(|gid| gid.value);
        let user = raw.user.given().map(|name| self.identity("access.user", name, identities::user));
        let group = raw.group.given().map(|name| self.identity("access.group", name, identities::group));
        let token = raw.token_file.given().and_then(|given| self.token_file("access.token_file", given));
        match (uid.or(user), gid.or(group), token) {
            (Some(uid), ..) => Who::Uid(uid),
            (None, None, Some(token)) => Who::TokenFile(token),
            (None, gid, _) => Who::Gid(gid.unwrap_or_default()),
        }
    }

    /// Returns the ID of the user or group with the given name. Reports an error if the name does not exist.
    fn identity(
        &mut self,
        label: &str,
        name: &Given<String>,
        look_up: impl FnOnce(&str, &str) -> Result<u32, ValueError>,
    ) -> u32 {
        self.ok_or_report(&name.span, look_up(label, &name.value)).unwrap_or_default()
    }

    fn access_bulkheads(&mut self, field: &Field<Arguments>, names: &[String]) -> Option<Vec<String>> {
        let given = field.given()?;
        self.check_not_empty("bulkheads", given);
        self.check_unique("access.bulkheads", &given.value);
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        for name in given.value.iter().filter(|name| !names.contains(&name.value.as_str())) {
            let message = format!(
                "`access.bulkheads` contains `{}`, but there is no bulkhead of that name",
                shown(&name.value)
            );
            let help = Self::suggest_name(&name.value, &names, "available bulkheads");
            self.problems.report(name.span.clone(), message, help);
        }
        Some(strings(given))
    }

    fn access_tenants(&mut self, field: &Field<Arguments>) -> Option<Vec<String>> {
        let given = field.given()?;
        self.check_not_empty("tenants", given);
        self.check_unique("access.tenants", &given.value);
        for name in &given.value {
            let result = match name.value.is_empty() {
                true => Err(ValueError::new(
                    "`access.tenants` contains an empty name",
                    "remove `tenants` to allow jobs without a tenant",
                )),
                false => check_tenant_name(&name.value),
            };
            self.ok_or_report(&name.span, result);
        }
        Some(strings(given))
    }

    /// Reports an empty list, because an empty list permits nothing. A list that is empty because all its elements were
    /// invalid has already been reported.
    fn check_not_empty(&mut self, name: &str, given: &Given<Arguments>) {
        if given.value.is_empty() && !self.problems.any_within(&given.span) {
            self.problems.report(
                given.span.clone(),
                format!("`access.{name}` is empty, so the entry would allow nothing"),
                format!("add a name, or remove `{name}` to allow all {name}"),
            );
        }
    }
}

fn strings(given: &Given<Arguments>) -> Vec<String> {
    given.value.iter().map(|name| name.value.clone()).collect()
}
