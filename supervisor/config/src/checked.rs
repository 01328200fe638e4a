//! The checked configuration: plain values, resolved and verified. This module does not know TOML. A
//! [`Config`] is always valid, so code that has one does not check the values again.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde::Serialize;

use super::{AccessConfig, BulkheadConfig, SupervisorConfig};

/// Metrics label of all tenants without a separate label, and of jobs without a tenant.
pub const OTHER_TENANTS: &str = "_other";

/// A complete configuration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Config {
    /// Absolute path of the configuration file.
    pub path: PathBuf,
    /// `[supervisor]`.
    pub supervisor: SupervisorConfig,
    /// `[[access]]`, in the order of the file. Empty: the supervisor's own user and root can do everything.
    pub access: Vec<AccessConfig>,
    /// The bulkheads, in the order of the file: at least one, with unique names.
    pub bulkheads: Vec<BulkheadConfig>,
}

impl Config {
    /// Returns the tenants with a separate metrics label, sorted: the first `tenant_labels` tenants that the
    /// file names. Other tenants get no label, so that clients cannot create any number of labels.
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
