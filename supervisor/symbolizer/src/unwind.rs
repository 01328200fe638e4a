//! Computes return addresses from the registers and the saved stack of a thread. The symbolizer calls this for each
//! recorded thread. `modules` reads the unwind tables, and `names` looks up functions and lines.

use framehop::{
    CacheNative, ExplicitModuleSectionInfo, FrameAddress, MayAllocateDuringUnwind, UnwindRegsNative,
    Unwinder, UnwinderNative,
};

use bulkhead_api::NATIVE_FRAMES_MAX;

use crate::modules::{Module, Modules};
use crate::record::{Mapping, Thread};

/// Code addresses of a stack frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CodeAddress {
    /// Address at which execution continues in the frame.
    pub(crate) address: u64,
    /// Address inside the instruction that the frame is executing, used to look up names. For a caller, this is an
    /// address inside the call instruction.
    pub(crate) lookup: u64,
}

impl CodeAddress {
    fn exact(address: u64) -> Self {
        Self { address, lookup: address }
    }
}

/// Unwinder for the threads of a process.
pub(crate) struct ProcessUnwinder<'m, 'r> {
    modules: &'m mut Modules<'r>,
    unwinder: UnwinderNative<Vec<u8>, MayAllocateDuringUnwind>,
    cache: CacheNative<MayAllocateDuringUnwind>,
}

impl<'m, 'r> ProcessUnwinder<'m, 'r> {
    pub(crate) fn new(modules: &'m mut Modules<'r>) -> Self {
        Self { modules, unwinder: UnwinderNative::new(), cache: CacheNative::new() }
    }

    /// Returns the code addresses of each frame, beginning with the function that crashed or was running.
    pub(crate) fn unwind(&mut self, thread: &Thread<'_>) -> Vec<CodeAddress> {
        let (current, mut registers) = registers(thread);
        let mut frames = vec![CodeAddress::exact(current)];
        let mut address = FrameAddress::from_instruction_pointer(current);
        if self.modules.mappings.at(current).is_none() {
            // The worker called an invalid function pointer, so there is no frame for the callee.
            let Some((caller, caller_registers)) = caller_of_invalid_call(self.modules, thread) else {
                return frames;
            };
            let Some(next) = FrameAddress::from_return_address(caller) else { return frames };
            frames.push(CodeAddress { address: caller, lookup: caller - 1 });
            (address, registers) = (next, caller_registers);
        }
        let mut read_stack = |address| thread.stack_word(address).ok_or(());
        while frames.len() < NATIVE_FRAMES_MAX {
            if let Some((mapping, module)) = self.modules.open_at(address.address_for_lookup())
                && let Some(unwind_module) = unwind_module(&mapping, module)
            {
                self.unwinder.add_module(unwind_module);
            }
            let next = self.unwinder.unwind_frame(address, &mut registers, &mut self.cache, &mut read_stack);
            let Ok(Some(caller)) = next else { break };
            let Some(next) = FrameAddress::from_return_address(caller) else { break };
            frames.push(CodeAddress { address: caller, lookup: next.address_for_lookup() });
            address = next;
        }
        frames
    }
}

fn unwind_module(mapping: &Mapping<'_>, module: &Module) -> Option<framehop::Module<Vec<u8>>> {
    let sections = module.unwind_sections()?;
    let split = |section: Option<(std::ops::Range<u64>, Vec<u8>)>| section.unzip();
    let (text_svma, text) = split(sections.text);
    let (eh_frame_svma, eh_frame) = split(sections.eh_frame);
    let (eh_frame_hdr_svma, eh_frame_hdr) = split(sections.eh_frame_hdr);
    let info = ExplicitModuleSectionInfo {
        base_svma: 0,
        text_svma,
        text,
        eh_frame_svma,
        eh_frame,
        eh_frame_hdr_svma,
        eh_frame_hdr,
        got_svma: sections.got,
        ..ExplicitModuleSectionInfo::default()
    };
    Some(framehop::Module::new(mapping.path.to_owned(), mapping.start..mapping.end, module.bias, info))
}

/// Returns the address of the current instruction, and the registers that are needed for unwinding.
#[cfg(target_arch = "x86_64")]
fn registers(thread: &Thread<'_>) -> (u64, UnwindRegsNative) {
    let [.., bp, _, _, _, _, sp, ip] =
        thread.header.registers.first_chunk::<17>().copied().unwrap_or_default();
    (ip, UnwindRegsNative::new(ip, sp, bp))
}

/// Finds the code that called an invalid address. Such a call has no stack frame. Returns the return address and the
/// caller's registers.
#[cfg(target_arch = "x86_64")]
fn caller_of_invalid_call(modules: &Modules<'_>, thread: &Thread<'_>) -> Option<(u64, UnwindRegsNative)> {
    let (_, registers) = registers(thread);
    let caller = thread.stack_word(registers.sp())?;
    modules.mappings.at(caller.checked_sub(1)?)?;
    let after_return = registers.sp().checked_add(8)?;
    Some((caller, UnwindRegsNative::new(caller, after_return, registers.bp())))
}

/// Returns the address of the current instruction, and the registers that are needed for unwinding.
#[cfg(target_arch = "aarch64")]
fn registers(thread: &Thread<'_>) -> (u64, UnwindRegsNative) {
    let [.., fp, lr, sp, pc] = thread.header.registers;
    (pc, UnwindRegsNative::new(lr, sp, fp))
}

/// Finds the code that called an invalid address. Such a call has no stack frame. Returns the return address and the
/// caller's registers.
#[cfg(target_arch = "aarch64")]
fn caller_of_invalid_call(modules: &Modules<'_>, thread: &Thread<'_>) -> Option<(u64, UnwindRegsNative)> {
    let (_, registers) = registers(thread);
    let caller = registers.lr();
    modules.mappings.at(caller.checked_sub(1)?)?;
    Some((caller, registers))
}
