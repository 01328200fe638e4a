//! `[[access]]`: who may do what on the jobs socket.

use std::ops::Range;

use crate::reader::{Arguments, Field, TableReader};
use crate::schema;

/// One entry.
pub(crate) struct RawAccess {
    /// The place of the entry.
    pub(crate) heading: Range<usize>,
    pub(crate) uid: Field<u64>,
    pub(crate) gid: Field<u64>,
    pub(crate) user: Field<String>,
    pub(crate) group: Field<String>,
    pub(crate) bulkheads: Field<Arguments>,
    pub(crate) tenants: Field<Arguments>,
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
