//! Looks up users and groups by name, and formulates the errors. `relations` calls this file for the keys that name a
//! user or group. No other module in this crate reads the user and group databases.

use nix::unistd::{Group, User};

use super::diagnostics::shown;
use super::values::ValueError;

/// Returns the ID of the user `name`.
pub(super) fn user(label: &str, name: &str) -> Result<u32, ValueError> {
    let found = User::from_name(name).map(|user| user.map(|user| user.uid.as_raw()));
    found_id(label, "user", name, found)
}

/// Returns the ID of the group `name`.
pub(super) fn group(label: &str, name: &str) -> Result<u32, ValueError> {
    let found = Group::from_name(name).map(|group| group.map(|group| group.gid.as_raw()));
    found_id(label, "group", name, found)
}

fn found_id(label: &str, what: &str, name: &str, found: nix::Result<Option<u32>>) -> Result<u32, ValueError> {
    let database = if what == "user" { "passwd" } else { "group" };
    match found {
        Ok(Some(id)) => Ok(id),
        Ok(None) => Err(ValueError::new(
            format!("`{label}`: there is no {what} `{}`", shown(name)),
            format!("write a name that `getent {database}` lists, or create the {what}"),
        )),
        Err(error) => Err(ValueError::new(
            format!("`{label}`: the {what} `{}` cannot be looked up: {error}", shown(name)),
            format!("run `getent {database} {}` to see the result", shown(name)),
        )),
    }
}
