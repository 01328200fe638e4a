//! Defines the exit codes of the `bulkhead` and `bulkhead-fleet` commands. Most of the codes are taken from
//! `sysexits.h`. `outcome` maps the outcomes of jobs to these codes, and each command chooses the codes for its other
//! failures.

#![expect(missing_docs, reason = "docs/operations/command.md describes the codes")]

pub const OK: u8 = 0;
pub const FAILED: u8 = 1;
pub const USAGE: u8 = 2;
/// The supervisor or bulkhead is not ready. `systemctl is-active` uses the same exit code.
pub const NOT_READY: u8 = 3;
pub const INVALID: u8 = 65;
pub const NOT_FOUND: u8 = 66;
pub const UNREACHABLE: u8 = 69;
pub const CRASHED: u8 = 70;
/// Writing the output failed.
pub const OUTPUT_FAILED: u8 = 74;
pub const TRY_LATER: u8 = 75;
pub const FORBIDDEN: u8 = 77;
/// A deadline has passed, or a wait has timed out. `timeout(1)` uses the same exit code.
pub const TIMED_OUT: u8 = 124;
pub const CANCELLED: u8 = 130;
