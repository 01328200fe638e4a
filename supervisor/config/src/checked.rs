//! What the rest of the supervisor works with: plain values, resolved and verified. Nothing here knows
//! TOML, and nothing here can be impossible: code that has a [`Config`] checks nothing again.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde::Serialize;

use super::{AccessConfig, BulkheadConfig, SupervisorConfig};

/// What metrics call all tenants that have no label of their own, and jobs without a tenant.
pub const OTHER_TENANTS: &str = "_other";

/// A whole configuration file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Config {
    /// The file it came from, absolute.
    pub path: PathBuf,
    /// `[supervisor]`.
    pub supervisor: SupervisorConfig,
    /// `[[access]]`, in the order of the file; empty: the supervisor's own user and root may do all.
    pub access: Vec<AccessConfig>,
    /// The bulkheads, in the order of the file; at least one, no name twice.
    pub bulkheads: Vec<BulkheadConfig>,
}

impl Config {
    /// The tenants that metrics name, sorted: the first `tenant_labels` that the file names. Other tenants get no
    /// label, so that clients cannot fill the table.
    pub fn labelled_tenants(&self) -> Vec<String> {
        let of_bulkheads = self.bulkheads.iter().flat_map(|bulkhead| bulkhead.tenant.keys());
        let of_access = self.access.iter().filter_map(|entry| entry.tenants.as_ref()).flatten();
        let mut named = BTreeSet::new();
        for tenant in of_bulkheads.chain(of_access) {
            if named.len() == self.supervisor.tenant_labels {
                break;
            }
            if tenant != OTHER_TENANTS {
                named.insert(tenant.clone());
            }
        }
        named.into_iter().collect()
    }
}
