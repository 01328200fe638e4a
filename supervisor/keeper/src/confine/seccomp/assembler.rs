//! Assembler for the instructions of classic BPF that a seccomp filter needs.
//!
//! All jumps are relative and forward, so blocks can be concatenated. This module knows nothing about system
//! calls except the layout of `seccomp_data`.

use std::mem::offset_of;

use libc::{seccomp_data, sock_filter};

/// A block of filter instructions. Execution starts at the first instruction, and ends with a verdict or continues
/// after the last instruction.
pub(super) type Block = Vec<sock_filter>;

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;
const JUMP: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
const JUMP_IF_IS: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const JUMP_IF_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const JUMP_IF_HAS_ANY: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// Condition that is checked against the number that was loaded last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Condition {
    Is(u32),
    AtLeast(u32),
    HasAny(u32),
}

pub(super) fn load_architecture() -> sock_filter {
    instruction(LOAD, offset_of!(seccomp_data, arch) as u32)
}

pub(super) fn load_number() -> sock_filter {
    instruction(LOAD, offset_of!(seccomp_data, nr) as u32)
}

/// Loads the lower half of an argument, masked with `mask`.
pub(super) fn load_argument(argument: u8, mask: u32) -> Block {
    let load = instruction(LOAD, argument_offset(argument));
    if mask == u32::MAX { vec![load] } else { vec![load, instruction(AND, mask)] }
}

/// Returns an instruction that makes the filter return this action.
pub(super) fn return_action(action: u32) -> sock_filter {
    instruction(RETURN, action)
}

/// Makes the filter return this action if the condition holds.
pub(super) fn return_if(condition: Condition, action: u32) -> Block {
    vec![jump_if(condition, 0, 1), return_action(action)]
}

/// Makes the filter return this action if the condition does not hold.
pub(super) fn return_unless(condition: Condition, action: u32) -> Block {
    vec![jump_if(condition, 1, 0), return_action(action)]
}

/// Returns a block that executes `yes` if the condition holds, and `no` otherwise. `yes` must end with a verdict,
/// because execution would otherwise continue with `no`.
pub(super) fn branch(condition: Condition, yes: Block, no: Block) -> Block {
    let mut block = match u8::try_from(yes.len()) {
        Ok(past) => vec![jump_if(condition, 0, past)],
        // Uses an unconditional jump, because a conditional jump cannot skip this many instructions.
        Err(_) => vec![jump_if(condition, 1, 0), instruction(JUMP, yes.len() as u32)],
    };
    block.extend(yes);
    block.extend(no);
    block
}

/// Returns a block that executes `null` if both halves of an argument are zero, and `otherwise` if not. `null` must end
/// with a verdict.
pub(super) fn branch_on_null(argument: u8, null: Block, otherwise: Block) -> Block {
    const IS_ZERO: Condition = Condition::Is(0);
    let lower = argument_offset(argument);
    let mut lower_is_zero = vec![instruction(LOAD, lower + size_of::<u32>() as u32)];
    lower_is_zero.extend(branch(IS_ZERO, null, otherwise.clone()));
    let mut block = vec![instruction(LOAD, lower)];
    block.extend(branch(IS_ZERO, lower_is_zero, otherwise));
    block
}

/// Returns the offset of an argument's lower half in `seccomp_data`. The upper half comes directly after the lower
/// half.
fn argument_offset(argument: u8) -> u32 {
    (offset_of!(seccomp_data, args) + usize::from(argument) * size_of::<u64>()) as u32
}

fn jump_if(condition: Condition, jt: u8, jf: u8) -> sock_filter {
    let (code, k) = match condition {
        Condition::Is(value) => (JUMP_IF_IS, value),
        Condition::AtLeast(value) => (JUMP_IF_AT_LEAST, value),
        Condition::HasAny(bits) => (JUMP_IF_HAS_ANY, bits),
    };
    sock_filter { code, jt, jf, k }
}

fn instruction(code: u16, k: u32) -> sock_filter {
    sock_filter { code, jt: 0, jf: 0, k }
}
