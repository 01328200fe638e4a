//! `[[access]]`: who may do what on the jobs socket.

use std::ops::Range;

use crate::config::reader::{Arguments, Field, TableReader};
use crate::config::schema;

/// One entry.
pub(in crate::config) struct RawAccess {
    /// The place of the entry.
    pub(in crate::config) heading: Range<usize>,
    pub(in crate::config) uid: Field<u64>,
    pub(in crate::config) gid: Field<u64>,
    pub(in crate::config) user: Field<String>,
    pub(in crate::config) group: Field<String>,
    pub(in crate::config) bulkheads: Field<Arguments>,
    pub(in crate::config) tenants: Field<Arguments>,
}

/// Reads the entries, in the order of the file.
pub(super) fn read(top: &mut TableReader<'_, '_>) -> Vec<RawAccess> {
    let mut entries = Vec::new();
    top.each_table("access", schema::ACCESS, |heading, entry| {
        entries.push(RawAccess {
            heading,
            uid: entry.count("uid"),
            gid: entry.count("gid"),
            user: entry.text("user"),
            group: entry.text("group"),
            bulkheads: entry.names("bulkheads"),
            tenants: entry.names("tenants"),
        });
    });
    entries
}
