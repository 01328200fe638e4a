//! The validated configuration, as plain values without file positions and independent of TOML. `relations` checks the
//! file's values and creates the [`Config`]. A [`Config`] is therefore always valid, so its users do not have to
//! validate it again.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde::Serialize;

use super::{AccessConfig, BulkheadConfig, SupervisorConfig};

/// Metrics label for tenants that have no separate label and for jobs that have no tenant.
pub const OTHER_TENANTS: &str = "_other";

/// A complete configuration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Config {
    /// Absolute path of the configuration file.
    pub path: PathBuf,
    /// Absolute paths of the files in `conf.d` that are part of the configuration, sorted by name.
    pub fragments: Vec<PathBuf>,
    /// Settings of `[supervisor]`.
    pub supervisor: SupervisorConfig,
    /// Rules of `[[access]]`, in file order. Without any rules, only root and the supervisor's own user have access,
    /// and can use all bulkheads.
    pub access: Vec<AccessConfig>,
    /// All bulkheads, in file order. There is at least one, and names are unique.
    pub bulkheads: Vec<BulkheadConfig>,
}

impl Config {
    /// Returns the sorted names of the tenants that have a separate metrics label. These are the first `tenant_labels`
    /// tenants in file order, those of the bulkheads before those in `[[access]]`. Clients cannot add labels.
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
