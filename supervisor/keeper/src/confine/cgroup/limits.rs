//! Converts the memory, process and processor limits of a worker to files of a control group and their values.
//! `DelegatedGroup::create_leaf` writes these files before the worker joins the group. The limits come from the
//! supervisor's order. Rlimits are unrelated, and are set in `spawn/steps.rs`.

use rustix::io::Errno;

use super::folder::Folder;
use super::{Failure, failure};

/// Limits for a worker and all its descendants together. `None` means unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Limits {
    /// Memory limit in bytes. The worker cannot use swap in addition to this memory.
    pub(crate) memory_bytes: Option<u64>,
    /// Maximum number of processes and threads.
    pub(crate) pids: Option<u64>,
    /// Maximum processor time as a number of cores, which can be fractional. Must be at least [`CORES_MIN`].
    pub(crate) cpu_cores: Option<f64>,
}

/// A file in a control group, and the value to write to the file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Setting {
    file: &'static str,
    value: String,
    /// True if the limit is skipped when the kernel lacks the file.
    is_optional: bool,
}

/// Quota period for `cpu.max`, in µs. For very low limits, this period is too short, because the quota would be below
/// the kernel's minimum.
const PERIOD_US: f64 = 100_000.0;

/// Longest period and smallest quota that the kernel accepts, in µs.
const PERIOD_US_MAX: f64 = 1_000_000.0;
const QUOTA_US_MIN: f64 = 1_000.0;

/// Highest value that the kernel accepts for `pids.max`. No kernel supports more processes.
const PIDS_MAX: u64 = 4_194_304;

/// Minimum value of [`Limits::cpu_cores`].
const CORES_MIN: f64 = QUOTA_US_MIN / PERIOD_US_MAX;

impl Limits {
    /// Returns the names of the controllers that these limits need.
    pub(super) fn controllers(&self) -> Vec<&'static str> {
        let needed = [
            ("memory", self.memory_bytes.is_some()),
            ("pids", self.pids.is_some()),
            ("cpu", self.cpu_cores.is_some()),
        ];
        needed.iter().filter(|(_, is_needed)| *is_needed).map(|(name, _)| *name).collect()
    }

    /// Returns the files to write in a new leaf group, each with its value.
    pub(super) fn settings(&self) -> Result<Vec<Setting>, Failure> {
        let required = |file, value| Setting { file, value, is_optional: false };
        let optional = |file, value| Setting { file, value, is_optional: true };
        // Forbids child groups, so that all processes of a worker can be killed and counted together.
        let mut settings = vec![required("cgroup.max.descendants", "0".to_owned())];
        if let Some(bytes) = self.memory_bytes {
            settings.push(required("memory.max", bytes.to_string()));
            // Makes the kernel kill all processes of the group when memory runs out. By default, the kernel kills only
            // one process, and the others would not work without it.
            settings.push(required("memory.oom.group", "1".to_owned()));
            settings.push(optional("memory.swap.max", "0".to_owned()));
        }
        if let Some(pids) = self.pids {
            settings.push(required("pids.max", pids.min(PIDS_MAX).to_string()));
        }
        if let Some(cores) = self.cpu_cores {
            let attempted =
                || format!("limit a worker to {cores} processor cores: the minimum is {CORES_MIN}");
            let value = cpu_max(cores).ok_or_else(|| failure(attempted(), Errno::INVAL))?;
            settings.push(required("cpu.max", value));
        }
        Ok(settings)
    }
}

impl Setting {
    pub(super) fn write(&self, leaf: &Folder) -> Result<(), Failure> {
        match leaf.write(self.file, &self.value) {
            Err(Failure { errno: Errno::NOENT, .. }) if self.is_optional => Ok(()),
            result => result,
        }
    }
}

/// Converts a number of cores into the value of `cpu.max`: quota and period, both in µs. Returns `None` if
/// the quota would be below the kernel's minimum.
fn cpu_max(cores: f64) -> Option<String> {
    if !cores.is_finite() || cores < CORES_MIN {
        return None;
    }
    let period = if cores * PERIOD_US < QUOTA_US_MIN { PERIOD_US_MAX } else { PERIOD_US };
    // The quota is rounded down to whole µs, but not below the kernel's minimum.
    let quota = (cores * period).floor().max(QUOTA_US_MIN);
    Some(format!("{quota:.0} {period:.0}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(limits: Limits) -> Vec<(&'static str, String)> {
        limits.settings().unwrap().into_iter().map(|setting| (setting.file, setting.value)).collect()
    }

    #[test]
    fn cgroup_limits_are_written_in_kernel_format() {
        let limits = Limits { memory_bytes: Some(512 << 20), pids: Some(32), cpu_cores: Some(1.5) };
        let expected = [
            ("cgroup.max.descendants", "0"),
            ("memory.max", "536870912"),
            ("memory.oom.group", "1"),
            ("memory.swap.max", "0"),
            ("pids.max", "32"),
            ("cpu.max", "150000 100000"),
        ];
        assert_eq!(written(limits), expected.map(|(file, value)| (file, value.to_owned())));
        assert_eq!(limits.controllers(), ["memory", "pids", "cpu"]);
    }

    #[test]
    fn unlimited_resources_need_no_controller() {
        assert_eq!(written(Limits::default()), [("cgroup.max.descendants", "0".to_owned())]);
        assert!(Limits::default().controllers().is_empty());
        assert_eq!(Limits { pids: Some(1), ..Limits::default() }.controllers(), ["pids"]);
    }

    #[test]
    fn process_limit_is_at_most_the_kernels_maximum() {
        let limits = |pids| Limits { pids: Some(pids), ..Limits::default() };
        assert_eq!(written(limits(u64::MAX))[1], ("pids.max", "4194304".to_owned()));
        assert_eq!(written(limits(4_194_303))[1], ("pids.max", "4194303".to_owned()));
    }

    #[test]
    fn only_swap_limit_is_optional() {
        let limits = Limits { memory_bytes: Some(1), pids: Some(1), cpu_cores: Some(1.0) };
        let settings = limits.settings().unwrap();
        let optional: Vec<_> = settings.iter().filter(|s| s.is_optional).map(|s| s.file).collect();
        assert_eq!(optional, ["memory.swap.max"]);
    }

    #[test]
    fn cpu_cores_are_converted_to_quota_and_period() {
        let cases = [
            (1.0, "100000 100000"),
            (0.5, "50000 100000"),
            (0.333, "33300 100000"),
            (0.01, "1000 100000"),
            (0.009, "9000 1000000"),
            (0.001, "1000 1000000"),
            (64.0, "6400000 100000"),
            (1024.0, "102400000 100000"),
        ];
        for (cores, expected) in cases {
            assert_eq!(cpu_max(cores).as_deref(), Some(expected), "{cores}");
        }
        for invalid in [0.0, 0.0009, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(cpu_max(invalid), None, "{invalid}");
        }
    }

    #[test]
    fn cpu_limit_below_minimum_is_rejected() {
        let refused = Limits { cpu_cores: Some(0.0001), ..Limits::default() }.settings().unwrap_err();
        assert!(refused.attempted.contains("0.0001 processor cores"), "{refused}");
        assert_eq!(refused.errno, Errno::INVAL);
    }
}
