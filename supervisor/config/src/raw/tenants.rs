//! `[bulkhead.NAME.tenant]`: one table for each tenant that has numbers of its own. Its keys are names that
//! the file chooses, so it has no place in the schema but for what is in them.

use bulkhead_shared::limits::TENANT_BYTES_MAX;
use toml::de::{DeTable, DeValue};

use super::admission::RawRateLimit;
use crate::diagnostics::{shown, shown_key};
use crate::reader::{Field, TableReader};
use crate::values::{self, Complaint};
use crate::{defaults, schema};

/// `[bulkhead.NAME.tenant.TENANT]`.
pub(crate) struct RawTenant {
    pub(crate) name: String,
    pub(crate) max_in_flight: Field<u64>,
    pub(crate) max_queue: Field<u64>,
    pub(crate) processes: Field<u64>,
    /// Without `per`, which would say nothing.
    pub(crate) rate_limit: RawRateLimit,
}

/// Reads the tables of a bulkhead's tenants, in the order of the file.
pub(super) fn read(bulkhead: &mut TableReader<'_, '_>) -> Vec<RawTenant> {
    let Some(named) = bulkhead.bare_table("tenant") else { return Vec::new() };
    let mut entries: Vec<_> = named.iter().collect();
    entries.sort_by_key(|(name, _)| name.span().start);
    if let Some((name, _)) = entries.get(defaults::TENANT_TABLES_MAX) {
        bulkhead.complain(name.span(), too_many());
        entries.truncate(defaults::TENANT_TABLES_MAX);
    }
    let mut tenants = Vec::new();
    for (name, value) in entries {
        if let Err(complaint) = check_name(name.get_ref()) {
            bulkhead.complain(name.span(), complaint);
        }
        match value.get_ref() {
            DeValue::Table(table) => tenants.push(read_tenant(name.get_ref(), table, bulkhead)),
            other => bulkhead.complain(value.span(), not_a_tenant(name.get_ref(), other)),
        }
    }
    tenants
}

fn read_tenant<'t>(name: &str, table: &'t DeTable<'t>, bulkhead: &mut TableReader<'t, '_>) -> RawTenant {
    let mut tenant = bulkhead.tenant(name, table);
    RawTenant {
        name: name.to_owned(),
        max_in_flight: tenant.count("max_in_flight"),
        max_queue: tenant.count("max_queue"),
        processes: tenant.count("processes"),
        rate_limit: RawRateLimit::read_of_tenant(&mut tenant),
    }
}

fn too_many() -> Complaint {
    Complaint::new(
        format!(
            "more than {} tenants with numbers of their own in one bulkhead",
            defaults::TENANT_TABLES_MAX
        ),
        "set what most of them have in [bulkhead.NAME] or [bulkhead.NAME.tenants]",
    )
}

/// What a job can say on the wire as its tenant, but for nothing: that is no tenant's name.
pub(crate) fn check_name(name: &str) -> Result<(), Complaint> {
    if name.is_empty() {
        return Err(Complaint::new(
            "the name of a tenant is empty",
            "write [bulkhead.NAME.tenant.TENANT]; a job without a tenant has the bulkhead's own numbers",
        ));
    }
    if name.len() > TENANT_BYTES_MAX {
        return Err(Complaint::new(
            format!("`{}` cannot name a tenant: it has {} bytes", shown(name), name.len()),
            format!("no job can name it; a tenant's name has at most {TENANT_BYTES_MAX} bytes"),
        ));
    }
    values::no_nul(&format!("tenant.{}", shown_key(name)), name)
}

/// Keys straight below `tenant` are most likely meant for all tenants.
fn not_a_tenant(name: &str, value: &DeValue<'_>) -> Complaint {
    let help = match schema::find(schema::TENANTS, name) {
        Some(_) => "keys for every tenant go into [bulkhead.NAME.tenants], keys for one into [bulkhead.NAME.tenant.TENANT]"
            .to_owned(),
        None => format!("write a section [bulkhead.NAME.tenant.{}]", shown_key(name)),
    };
    let found = values::type_name(value);
    Complaint::new(format!("`tenant.{}` must be a table, not {found}", shown_key(name)), help)
}
