//! `[[access]]`: permissions of users and groups on the jobs socket.

use serde::Serialize;

use super::kinds::*;
use crate::defaults::*;
use crate::key::{ACCESS, Kind};
use crate::reader::Arguments;
use crate::table::table;

table! {
    /// Keys of an `[[access]]` rule.
    AccessKeys, ACCESS;

    /// User id that the rule applies to.
    uid: u32 as count(0, ID_MAX), without "none", such as "1001";
    /// Group id that the rule applies to.
    gid: u32 as count(0, ID_MAX), without "none", such as "1001";
    /// Name of the user that the rule applies to. The user must exist when the supervisor reads the file.
    user: String as Kind::Text, without "none", such as "\"www-data\"";
    /// Name of the group that the rule applies to. The group must exist when the supervisor reads the file.
    group: String as Kind::Text, without "none", such as "\"www-data\"";
    /// Names of the bulkheads that the user or group can use.
    bulkheads: Arguments as Kind::Names(BULKHEADS_MAX), without "all", such as "[\"thumbnail\"]";
    /// Tenants that the user or group can submit jobs for. If set, each job must name one of these tenants.
    tenants: Arguments as Kind::Names(ACCESS_TENANTS_MAX), without "any, or none", such as "[\"acme\"]";
}

/// An `[[access]]` rule, which gives permissions to a user or group. A client that matches no rule has no
/// permissions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AccessConfig {
    /// User or group that the rule applies to. Compared with the peer credentials of the connection.
    pub who: Who,
    /// Names of the permitted bulkheads, at least one. `None`: all bulkheads.
    pub bulkheads: Option<Vec<String>>,
    /// Names of the permitted tenants, at least one. `None`: jobs can name any tenant, or no tenant.
    pub tenants: Option<Vec<String>>,
}

/// A user or a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Who {
    /// User id.
    Uid(u32),
    /// Group id.
    Gid(u32),
}
