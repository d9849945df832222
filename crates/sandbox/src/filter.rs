//! System calls, restricted with seccomp.
//!
//! The kernel runs three filters, and the strictest result counts. One ends the process, one
//! reports a call as missing, one refuses every call that is not allowed.

use crate::calls::{self, Argument, Conditions};
use crate::profile::Profile;
use crate::{Error, refusal};
use libc::c_long;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use std::collections::BTreeMap;

/// Removes, on all threads, every call that a server with this profile does not make.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn restrict(profile: &Profile) -> Result<(), Error> {
    let programs = compile(profile).map_err(seccompiler::Error::Backend)?;
    refusal::handle().map_err(Error::Signal)?;
    // The filter that refuses the installation of filters is the last.
    programs.iter().try_for_each(|program| seccompiler::apply_filter_all_threads(program))?;
    Ok(())
}

fn compile(profile: &Profile) -> Result<[BpfProgram; 3], BackendError> {
    let allow = SeccompAction::Allow;
    let whole = |calls: &[c_long]| calls.iter().map(|call| (*call, Vec::new())).collect();
    let allowed = calls::allowed(profile).into_iter().map(|(call, conditions)| {
        let rules: Result<_, _> = conditions.into_iter().map(rule).collect();
        Ok((call, rules?))
    });
    Ok([
        program(whole(calls::DEADLY), allow.clone(), SeccompAction::KillProcess)?,
        program(whole(calls::ABSENT), allow.clone(), SeccompAction::Errno(libc::ENOSYS as u32))?,
        program(allowed.collect::<Result<_, BackendError>>()?, refusal::ACTION, allow)?,
    ])
}

fn program(
    rules: BTreeMap<c_long, Vec<SeccompRule>>,
    otherwise: SeccompAction,
    action: SeccompAction,
) -> Result<BpfProgram, BackendError> {
    let machine: TargetArch = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, otherwise, action, machine)?.try_into()
}

fn rule(conditions: Conditions) -> Result<SeccompRule, BackendError> {
    let conditions = conditions.into_iter().map(|(place, argument)| {
        let (compare, value) = match argument {
            Argument::Is(value) => (SeccompCmpOp::Eq, value),
            Argument::IsNot(value) => (SeccompCmpOp::Ne, value),
            Argument::Lacks(bits) => (SeccompCmpOp::MaskedEq(bits.into()), 0),
        };
        SeccompCondition::new(place, SeccompCmpArgLen::Dword, compare, value.into())
    });
    SeccompRule::new(conditions.collect::<Result<_, _>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filters_fit_into_what_the_kernel_takes() {
        const MOST_INSTRUCTIONS: usize = 4096; // BPF_MAXINSNS
        let mut profile = Profile::default();
        profile.read_keyrings();
        for program in compile(&profile).unwrap() {
            assert!((1..=MOST_INSTRUCTIONS).contains(&program.len()), "{}", program.len());
        }
    }
}
