//! `[[access]]`: permissions of users and groups on the jobs socket.

use serde::Serialize;

use super::kinds::*;
use crate::defaults::*;
use crate::key::{ACCESS, Kind};
use crate::reader::Arguments;
use crate::table::table;

table! {
    /// An entry of `[[access]]`.
    AccessKeys, ACCESS;

    /// User that the entry applies to, by id.
    uid: u32 as count(0, ID_MAX), without "none", such as "1001";
    /// Group that the entry applies to, by id.
    gid: u32 as count(0, ID_MAX), without "none", such as "1001";
    /// User that the entry applies to, by name. The user must exist when the file is read.
    user: String as Kind::Text, without "none", such as "\"www-data\"";
    /// Group that the entry applies to, by name. The group must exist when the file is read.
    group: String as Kind::Text, without "none", such as "\"www-data\"";
    /// Bulkheads of this file that the user or group can use.
    bulkheads: Arguments as Kind::Names(BULKHEADS_MAX), without "all", such as "[\"thumbnail\"]";
    /// Tenants that jobs of the user or group can name. If set, each of these jobs must name one.
    tenants: Arguments as Kind::Names(ACCESS_TENANTS_MAX), without "any, or none", such as "[\"acme\"]";
}

/// `[[access]]`: permissions of a user or group. A client that matches no entry has no permissions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AccessConfig {
    /// User or group that the entry applies to, by peer credentials.
    pub who: Who,
    /// Permitted bulkheads: at least one, all of them in the file. `None`: all bulkheads.
    pub bulkheads: Option<Vec<String>>,
    /// Permitted tenants, at least one. `None`: any tenant, or no tenant.
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
