//! `npuhal doctor`: a check list that ends in a verdict and the next command.

use crate::Host;
use crate::args::DoctorArgs;
use crate::doctor::machine::Machine;
use crate::doctor::{self, Target};
use crate::error::CliError;
use crate::terminal::say;
use npuhal_registry::{DeviceAddress, DeviceUri};

pub(crate) fn doctor(host: &Host, args: &DoctorArgs) -> Result<(), CliError> {
    let target = target(args)?;
    let machine = match &args.root {
        Some(root) if !root.is_dir() => {
            return Err(CliError::Usage(format!("--root {}: wanted a directory", root.display())));
        }
        Some(root) => Machine::at(root),
        None => Machine::this(),
    };
    let report = doctor::examine(&machine, &target, args.kernel_log.as_deref(), host.global.models_dir.as_deref())?;
    say(&if args.json { report.json() } else { report.text() })?;
    match report.overall().exit_code() {
        0 => Ok(()),
        code => Err(CliError::Verdict(code)),
    }
}

fn target(args: &DoctorArgs) -> Result<Target, CliError> {
    let Some(text) = &args.device else { return Ok(Target::Machine) };
    let uri: DeviceUri = text.parse().map_err(|error| CliError::Usage(format!("--device: {error}")))?;
    match &uri.address {
        DeviceAddress::Virtual(_) if args.kernel_log.is_some() => {
            Err(CliError::Usage(format!("--kernel-log: {text} has no kernel; leave one of the two out")))
        }
        DeviceAddress::Virtual(_) => Ok(Target::Virtual(uri)),
        DeviceAddress::Npu(_) | DeviceAddress::Path { .. } if uri.parameters.is_empty() => Ok(Target::Npu(uri)),
        _ => Err(CliError::Usage(format!(
            "--device: doctor tries NPUs, not '{text}'; wanted e.g. npu1, npu5, amdxdna:/dev/accel/accel0, virtual:npu1"
        ))),
    }
}
