//! The part of a bulkhead that is about what its workers can reach and use.

use super::admission::raw_table;
use crate::reader::{Arguments, Field, TableReader};
use crate::schema;

/// `sandbox`.
pub(crate) struct RawSandbox {
    pub(crate) profile: Field<&'static str>,
    pub(crate) network: Field<bool>,
    pub(crate) read: Field<Arguments>,
    pub(crate) write: Field<Arguments>,
    pub(crate) tmp: Field<u64>,
    pub(crate) user: Field<String>,
    pub(crate) syscalls: RawSyscalls,
    /// Words of the schema.
    pub(crate) best_effort: Field<Arguments>,
}

impl RawSandbox {
    pub(super) fn read(bulkhead: &mut TableReader<'_, '_>) -> Self {
        match bulkhead.table("sandbox", schema::SANDBOX) {
            Some(mut sandbox) => Self {
                profile: sandbox.word("profile"),
                network: sandbox.boolean("network"),
                read: sandbox.names("read"),
                write: sandbox.names("write"),
                tmp: sandbox.size("tmp"),
                user: sandbox.text("user"),
                syscalls: RawSyscalls::read(&mut sandbox),
                best_effort: sandbox.names("best_effort"),
            },
            None => Self {
                profile: Field::Absent,
                network: Field::Absent,
                read: Field::Absent,
                write: Field::Absent,
                tmp: Field::Absent,
                user: Field::Absent,
                syscalls: RawSyscalls::default(),
                best_effort: Field::Absent,
            },
        }
    }

    pub(super) fn over(self, defaults: &Self) -> Self {
        Self {
            profile: self.profile.or(&defaults.profile),
            network: self.network.or(&defaults.network),
            read: self.read.or(&defaults.read),
            write: self.write.or(&defaults.write),
            tmp: self.tmp.or(&defaults.tmp),
            user: self.user.or(&defaults.user),
            syscalls: self.syscalls.over(&defaults.syscalls),
            best_effort: self.best_effort.or(&defaults.best_effort),
        }
    }
}

raw_table!(
    /// `sandbox.syscalls`.
    RawSyscalls, "syscalls", schema::SYSCALLS, {
        allow: names -> Arguments,
        deny: names -> Arguments,
    }
);
raw_table!(
    /// `cgroup`.
    RawCgroup, "cgroup", schema::CGROUP, {
        memory: size -> u64,
        pids: count -> u64,
        cpu: number -> f64,
    }
);
