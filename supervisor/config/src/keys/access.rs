//! `[[access]]`: what users and groups may do on the jobs socket.

use serde::Serialize;

use super::kinds::*;
use crate::defaults::*;
use crate::key::{ACCESS, Kind};
use crate::reader::Arguments;
use crate::table::table;

table! {
    /// One entry of `[[access]]`.
    AccessKeys, ACCESS;

    /// The user that the entry is for, by id.
    uid: u32 as count(0, ID_MAX), without "none", such as "1001";
    /// The group that the entry is for, by id.
    gid: u32 as count(0, ID_MAX), without "none", such as "1001";
    /// The user that the entry is for, by a name that there is when the file is read.
    user: String as Kind::Text, without "none", such as "\"www-data\"";
    /// The group that the entry is for, by a name that there is when the file is read.
    group: String as Kind::Text, without "none", such as "\"www-data\"";
    /// The bulkheads of the file that they may use.
    bulkheads: Arguments as Kind::Names(BULKHEADS_MAX), without "all", such as "[\"thumbnail\"]";
    /// The tenants that their jobs may name. With it each of their jobs names one.
    tenants: Arguments as Kind::Names(ACCESS_TENANTS_MAX), without "any, or none", such as "[\"acme\"]";
}

/// `[[access]]`: what one user or group may do. A client that fits no entry may do nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AccessConfig {
    /// The user or group it is for, by the credentials of the peer.
    pub who: Who,
    /// Bulkheads that they may use, at least one, each in the file; `None`: all.
    pub bulkheads: Option<Vec<String>>,
    /// Tenants that their jobs may name, at least one; `None`: any, or none at all.
    pub tenants: Option<Vec<String>>,
}

/// A user or a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Who {
    /// A user.
    Uid(u32),
    /// A group.
    Gid(u32),
}
