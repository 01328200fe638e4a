//! Declares the keys of an `[[access]]` entry, which grants permissions to users and groups on the jobs socket, or to
//! tokens over HTTP. `relations::access` checks the entries, and `bulkhead_plane::access` enforces them.

use std::path::PathBuf;

use bulkhead_shared::vocabulary;
use serde::{Serialize, Serializer};

use super::kinds::*;
use crate::defaults::*;
use crate::key::{ACCESS, Kind};
use crate::reader::Arguments;
use crate::table::table;
use crate::token::Token;

table! {
    /// Keys of an `[[access]]` rule.
    AccessKeys, ACCESS;

    /// User ID that the rule applies to.
    uid: u32 as count(0, ID_MAX), without "none", such as "1001";
    /// Group ID that the rule applies to.
    gid: u32 as count(0, ID_MAX), without "none", such as "1001";
    /// Name of the user that the rule applies to. The user must exist when the supervisor reads the file.
    user: String as Kind::Text, without "none", such as "\"www-data\"";
    /// Name of the group that the rule applies to. The group must exist when the supervisor reads the file.
    group: String as Kind::Text, without "none", such as "\"www-data\"";
    /// File with the token (16 to 4096 visible ASCII characters) of the requests that the entry applies to.
    /// The file must be readable only by its owner and group. A reload rereads the file.
    token_file: String as Kind::Path, without "none", such as "\"/etc/bulkhead/jobs-token\"";
    /// Permission that the token grants: `"jobs"` to submit jobs to `jobs_http`, `"read"` to send every GET
    /// request of the admin API on `http`, without access to payloads. Needs `token_file`.
    role: Role as one_of::<Role>(), default Role::Jobs;
    /// Bulkheads in this file that the user, group or token can use.
    bulkheads: Arguments as Kind::Names(BULKHEADS_MAX), without "all", such as "[\"thumbnail\"]";
    /// Tenants that jobs from the user, group or token can name. If set, each of these jobs must name a
    /// tenant.
    tenants: Arguments as Kind::Names(ACCESS_TENANTS_MAX), without "any, or none", such as "[\"acme\"]";
}

vocabulary! {
    /// Purpose of a token.
    Role {
        /// Submits jobs to `jobs_http`.
        Jobs = "jobs",
        /// Reads the admin API.
        Read = "read",
    }
}

/// `[[access]]`: permissions of a user, a group or a token. A client that matches no entry has no permissions.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AccessConfig {
    /// User, group or token that the entry applies to. Users and groups are identified by peer credentials.
    pub who: Who,
    /// Purpose of the token. Always [`Role::Jobs`] for users and groups.
    #[serde(serialize_with = "role_name")]
    pub role: Role,
    /// Names of the permitted bulkheads, at least one. `None` means all bulkheads.
    pub bulkheads: Option<Vec<String>>,
    /// Names of the permitted tenants, at least one. `None` means that jobs can name any tenant or none.
    pub tenants: Option<Vec<String>>,
}

/// A user, a group, or the holder of a token.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Who {
    /// User ID.
    Uid(u32),
    /// Group ID.
    Gid(u32),
    /// The holder of a token that was read from a file.
    TokenFile(TokenFile),
}

impl Who {
    /// Returns the token and its file, or `None` for a user or group.
    pub fn token_file(&self) -> Option<&TokenFile> {
        match self {
            Self::TokenFile(file) => Some(file),
            Self::Uid(_) | Self::Gid(_) => None,
        }
    }
}

/// A token and the file that contains it. Serialized as the path of the file.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub struct TokenFile {
    /// Absolute path of the file.
    pub path: PathBuf,
    /// Token that the file contained when the configuration was read.
    #[serde(skip)]
    pub token: Token,
}

fn role_name<S: Serializer>(role: &Role, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(role.name())
}
