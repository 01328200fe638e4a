//! Defines the native part of a crash report, with register values and backtraces. The symbolizer creates this part
//! from a crash record, and the control plane adds it to the report. The contents can be forged, so
//! [`NativeCrash::is_valid`] checks the size limits.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Maximum number of frames per thread.
pub const NATIVE_FRAMES_MAX: usize = 64;

/// Maximum total number of frames in a document.
pub const NATIVE_FRAMES_TOTAL_MAX: usize = 256;

/// Maximum number of threads.
pub const NATIVE_THREADS_MAX: usize = 64;

/// Maximum number of registers per thread.
const REGISTERS_MAX: usize = 64;

/// Maximum size of each text field, in bytes.
const TEXT_BYTES_MAX: usize = 512;

/// Maximum size of the JSON text of a [`NativeCrash`], in bytes. Any document that a symbolizer produces is smaller.
pub const NATIVE_BYTES_MAX: u64 = 1024 * 1024;

/// Backtraces of a process that was killed by a signal or exceeded a time limit, or the reason why there are none. All
/// contents come from the process itself, so they can be forged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NativeCrash {
    /// Reason why there is no backtrace. Completes a sentence that begins with "no backtrace:".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unavailable: Option<String>,
    /// Cause of the signal (`si_code`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal_code: Option<i32>,
    /// Address that caused the signal, in hexadecimal digits. For SIGSEGV, the address that could not be accessed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The threads of the process. If a signal killed the process, contains only the thread that received the signal.
    /// Otherwise contains all threads of the process and its descendants, up to a maximum.
    #[serde(default)]
    pub threads: Vec<NativeThread>,
}

/// A thread and its backtrace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NativeThread {
    /// Thread ID, as seen by the process itself if a signal killed the process, and as seen by the supervisor
    /// otherwise.
    pub id: u32,
    /// Name of the thread. Present if the process exceeded a time limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Process ID. Present if the process exceeded a time limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<u32>,
    /// Name of the process. Present if the process exceeded a time limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// State of the thread as in `/proc/PID/stat`, such as `S` for a sleeping thread. Present if the process exceeded a
    /// time limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// Kernel function in which the thread is sleeping (`/proc/PID/wchan`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_in: Option<String>,
    /// Register values in hexadecimal digits, by name. Present if a signal killed the process.
    #[serde(default)]
    pub registers: BTreeMap<String, String>,
    /// Stack frames, starting with the function that crashed or was running.
    pub frames: Vec<NativeFrame>,
}

/// A stack frame. Each inlined function has a separate frame.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NativeFrame {
    /// Path of the program or library.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub module: Option<String>,
    /// Address within the module, in the hexadecimal form that `addr2line` expects. If there is no module, the address
    /// in the process.
    pub offset: String,
    /// Build ID of the module.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build_id: Option<String>,
    /// Name of the function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub function: Option<String>,
    /// Source file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Line in the source file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
}

impl NativeFrame {
    fn texts(&self) -> impl Iterator<Item = &String> {
        let Self { module, offset, build_id, function, file, line: _ } = self;
        [module.as_ref(), Some(offset), build_id.as_ref(), function.as_ref(), file.as_ref()]
            .into_iter()
            .flatten()
    }

    /// Truncates all text fields to the maximum size. Paths are truncated at the beginning.
    pub fn truncate_texts(&mut self) {
        for path in [&mut self.module, &mut self.file].into_iter().flatten() {
            let start = path.len().saturating_sub(TEXT_BYTES_MAX);
            let start = (start..=path.len()).find(|at| path.is_char_boundary(*at)).unwrap_or(0);
            path.drain(..start);
        }
        for text in [&mut self.function, &mut self.build_id].into_iter().flatten() {
            text.truncate(bulkhead_shared::limits::truncate(text, TEXT_BYTES_MAX).len());
        }
    }
}

impl NativeCrash {
    /// Creates a document without a backtrace. `reason` completes a sentence that begins with "no backtrace:".
    pub fn unavailable(reason: &str) -> Self {
        let reason = bulkhead_shared::limits::truncate(reason, TEXT_BYTES_MAX);
        Self { unavailable: Some(reason.to_owned()), ..Self::default() }
    }

    /// Returns the approximate memory usage, in bytes.
    pub fn bytes(&self) -> usize {
        let of_frame =
            |frame: &NativeFrame| size_of::<NativeFrame>() + frame.texts().map(String::len).sum::<usize>();
        let of_thread = |thread: &NativeThread| {
            let registers = thread
                .registers
                .iter()
                .map(|(name, value)| name.len() + value.len() + size_of::<[String; 2]>());
            registers.sum::<usize>() + thread.frames.iter().map(of_frame).sum::<usize>()
        };
        size_of::<Self>() + self.threads.iter().map(of_thread).sum::<usize>()
    }

    /// Returns true if the document exceeds none of the limits on sizes and on numbers of elements. Callers must check
    /// documents that come from other processes.
    pub fn is_valid(&self) -> bool {
        let is_short = |text: &String| text.len() <= TEXT_BYTES_MAX;
        let is_valid_frame = |frame: &NativeFrame| frame.texts().all(is_short);
        let is_valid_thread = |thread: &NativeThread| {
            let texts = [&thread.name, &thread.program, &thread.state, &thread.waits_in];
            texts.into_iter().flatten().all(is_short)
                && thread.registers.len() <= REGISTERS_MAX
                && thread.registers.iter().all(|(name, value)| is_short(name) && is_short(value))
                && thread.frames.len() <= NATIVE_FRAMES_MAX
                && thread.frames.iter().all(is_valid_frame)
        };
        self.unavailable.iter().chain(&self.address).all(is_short)
            && self.threads.len() <= NATIVE_THREADS_MAX
            && self.threads.iter().all(is_valid_thread)
    }
}

/// Formats an address or a register value.
pub fn hex(value: u64) -> String {
    format!("{value:#x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backtrace_beyond_size_limits_is_invalid() {
        let long = "x".repeat(TEXT_BYTES_MAX) + "/the end";
        let mut frame = NativeFrame {
            module: Some(format!("é{long}")),
            function: Some(long.clone()),
            ..NativeFrame::default()
        };
        let crash = |frame: &NativeFrame, count| NativeCrash {
            threads: vec![NativeThread { frames: vec![frame.clone(); count], ..NativeThread::default() }],
            ..NativeCrash::default()
        };
        assert!(!crash(&frame, 1).is_valid());
        frame.truncate_texts();
        assert!(frame.module.as_ref().unwrap().ends_with("/the end"), "{frame:?}");
        assert!(crash(&frame, NATIVE_FRAMES_MAX).is_valid());
        assert!(!crash(&frame, NATIVE_FRAMES_MAX + 1).is_valid());
        assert!(NativeCrash::unavailable(&long).is_valid());
        let text = serde_json::to_string(&crash(&frame, NATIVE_FRAMES_MAX)).unwrap();
        assert!((text.len() as u64) < NATIVE_BYTES_MAX);
    }
}
