//! Trials: a device is opened, a context is made on it, a command is run. That a device is listed proves nothing.

use super::{Check, List, Remedy, Status, Subject};
use crate::error::CliError;
use crate::npu::virtual_device;
use npuhal_amdxdna::discovery::FoundNpu;
use npuhal_amdxdna::driver::{ContextSpec, Driver, Qos};
use npuhal_amdxdna::error::{Operation, driver_error};
use npuhal_amdxdna::format::txn::Version;
use npuhal_amdxdna::kernel_driver::KernelDriver;
use npuhal_amdxdna::silicon::Silicon;
use npuhal_amdxdna::{NpuDevice, NpuIdentity};
use npuhal_core::device::{Arg, BufferSpec, Completion, Deadline, Device, LengthUnit, Program};
use npuhal_core::{DeviceError, RunError};
use npuhal_registry::DeviceUri;
use npuhal_virtual::kit::{self, KitError};
use npuhal_virtual::{VirtualDevice, VirtualSpec};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// Words that the trial command copies.
const COPY_WORDS: u32 = 4096;
/// Longer than every driver's own watch-dog; a command of this size takes well under a millisecond.
const PATIENCE: Duration = Duration::from_secs(90);

/// Opens an NPU of this machine and makes a context on it.
pub(super) fn examine_found(list: &mut List, npu: &FoundNpu, holders: &[String]) {
    let (Some(silicon), Some(node), Some(card)) = (npu.silicon, &npu.node, npu.card()) else { return };
    let identity =
        NpuIdentity { id: card.id, name: card.name, silicon, is_virtual: false, address: npu.pci_address.clone() };
    let driver = KernelDriver::open(node).map_err(|errno| driver_error(Operation::Open, errno));
    let Some((driver, device)) = opened(list, driver.map(|driver| Arc::new(driver) as Arc<dyn Driver>), &identity)
    else {
        return;
    };
    let check = context(driver.as_ref(), &device, holders);
    let is_well = check.status == Status::Ok;
    list.checks.push(check);
    if is_well {
        list.not_tried.push(format!(
            "no command was run on {}: that needs a kernel that was compiled for it, and none comes with this version of \
             npuhal. Not shown, therefore: configuration of the array, submission, and that results are right",
            npu.id
        ));
    }
}

/// The whole way on a virtual NPU: device, context, command, result.
pub(super) fn examine_virtual(list: &mut List, uri: &DeviceUri) -> Result<Subject, CliError> {
    let (hardware, identity) = virtual_device(uri).map_err(|error| CliError::Usage(format!("--device: {error}")))?;
    let spec = hardware.spec();
    list.checks.push(Check::new("npu").found(format!("{spec}: {} (virtual: no hardware is used)", identity.name)));
    let first = list.checks.len();
    if let Some((driver, device)) = opened(list, Ok(hardware.connect() as Arc<dyn Driver>), &identity) {
        list.checks.push(context(driver.as_ref(), &device, &[]));
        list.checks.push(command(&device, spec, &hardware));
    }
    for check in list.checks.iter_mut().skip(first).filter(|check| check.status != Status::Ok) {
        check.remedies = vec![if spec.faults.is_empty() {
            Remedy::advice("this is a defect of npuhal; please report it with this message")
        } else {
            Remedy::command(
                format!("the fault was asked for ({}); leave it out", spec.faults),
                format!("npuhal doctor --device virtual:{}", spec.silicon),
            )
        }];
    }
    Ok(Subject::Virtual(uri.to_string()))
}

fn command(device: &NpuDevice, spec: &VirtualSpec, hardware: &VirtualDevice) -> Check {
    let check = Check::new("command");
    match run_copy(device, spec) {
        Ok(completion) => {
            let time = completion.device_time.map_or_else(String::new, |time| {
                format!(", {:.3} ms of device time ({})", time.elapsed.as_secs_f64() * 1e3, time.claim)
            });
            check.found(format!("virtual: copied {COPY_WORDS} words with the right result{time}"))
        }
        Err(error) => {
            let why = hardware.diagnoses().first().map(|diagnosis| format!(" (the array: {diagnosis})"));
            check.with_issue(Status::Fail, format!("virtual: {error}{}", why.unwrap_or_default()), [])
        }
    }
}

/// The client on an open driver.
fn opened(
    list: &mut List,
    driver: Result<Arc<dyn Driver>, DeviceError>,
    identity: &NpuIdentity,
) -> Option<(Arc<dyn Driver>, NpuDevice)> {
    let check = Check::new("device");
    let result = driver.and_then(|driver| Ok((Arc::clone(&driver), NpuDevice::open(driver, identity)?)));
    match result {
        Ok((driver, device)) => {
            let card = device.card();
            let version = card.driver.as_ref().map(|driver| {
                let firmware = driver.firmware.as_deref().unwrap_or("of unknown version");
                format!("{} {}, firmware {firmware}", driver.name, driver.version)
            });
            list.checks.push(check.found(format!(
                "{} opened: {}, {} columns × {} core rows",
                card.id,
                version.unwrap_or_default(),
                card.columns,
                card.core_rows
            )));
            Some((driver, device))
        }
        Err(error) => {
            list.checks.push(check.with_issue(Status::Fail, error.to_string(), remedy_of(&error)));
            None
        }
    }
}

/// A context of one column, as a kernel that is one column wide would ask for; given back at once.
fn context(driver: &dyn Driver, device: &NpuDevice, holders: &[String]) -> Check {
    let check = Check::new("context");
    let card = device.card();
    let spec = ContextSpec { num_tiles: card.core_rows, max_opc: 0, qos: Qos::default() };
    let created = retry(|| driver.create_context(&spec));
    let created = match created {
        Ok(created) => created,
        Err(errno) => {
            let error = driver_error(Operation::CreateContext, errno);
            let held = if holders.is_empty() { String::new() } else { format!("; held by {}", holders.join(", ")) };
            return check.with_issue(
                Status::Fail,
                format!("{} is listed and opens, but {error}{held}", card.id),
                [Remedy::command(
                    "close other NPU programs; if there is none, use a driver and a firmware that come from one source",
                    "sudo dmesg | grep -i amdxdna",
                )],
            );
        }
    };
    let ended = retry(|| driver.destroy_syncobj(created.syncobj))
        .and_then(|()| retry(|| driver.destroy_context(created.context)));
    match ended {
        Ok(()) => {
            let limit = card
                .context_limit
                .map_or_else(String::new, |limit| format!(" (the device has {limit} for all programs)"));
            let kind = if card.is_virtual { "virtual: " } else { "" };
            check.found(format!("{kind}made a hardware context of 1 column and gave it back{limit}"))
        }
        Err(errno) => {
            let error = driver_error(Operation::DestroyContext, errno);
            check.with_issue(Status::Fail, error.to_string(), remedy_of(&error))
        }
    }
}

/// Why a trial command did not give its result.
#[derive(Debug, Error)]
enum TrialError {
    #[error(transparent)]
    Kit(#[from] KitError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error("the command completed with a wrong result: wanted the {words} words of the input, found {wrong} others")]
    WrongResult { words: u32, wrong: usize },
}

/// Copies a buffer: xclbin and instruction stream on the first generation, a full ELF on the second.
fn run_copy(device: &NpuDevice, spec: &VirtualSpec) -> Result<Completion, TrialError> {
    let is_first = spec.silicon == Silicon::Npu1;
    let version = if is_first { Version::Wide } else { Version::Compact };
    let kit = kit::copy(spec.silicon, version, COPY_WORDS, 2, 256)?;
    let (xclbin, stream, elf) = (kit.xclbin()?, kit.instructions()?, kit.full_elf(true)?);
    let full = Program::FullElf { image: &elf, kernel: &kit.name };
    let (boot, program) = if is_first {
        let unit = Program::Instructions { unit: &kit.name, stream: &stream, length_unit: LengthUnit::Words };
        (Program::Xclbin { image: &xclbin }, unit)
    } else {
        (full, full)
    };
    let mut context = device.open_context(&boot)?;
    let kernel = context.load(&program)?;
    let input: Vec<u8> = (0..COPY_WORDS).flat_map(|i| i.wrapping_mul(0x9E37_79B1).to_le_bytes()).collect();
    let source = device.allocate(&BufferSpec::tensor(input.len() as u64, "trial input"))?;
    let target = device.allocate(&BufferSpec::tensor(input.len() as u64, "trial output"))?;
    source.write(0, &input)?;
    target.write(0, &vec![0xA5; input.len()])?;
    let mut list = context.runlist();
    list.push(&*kernel, &[Arg::Buffer(source), Arg::Buffer(target.clone())])?;
    let completion = list.submit()?.wait(Deadline::within(PATIENCE))?;
    let mut output = vec![0; input.len()];
    target.read(0, &mut output)?;
    let wrong = input.chunks_exact(4).zip(output.chunks_exact(4)).filter(|(wanted, found)| wanted != found).count();
    if wrong == 0 { Ok(completion) } else { Err(TrialError::WrongResult { words: COPY_WORDS, wrong }) }
}

/// Calls again while the driver was interrupted.
fn retry<T>(
    mut call: impl FnMut() -> Result<T, npuhal_amdxdna::errno::Errno>,
) -> Result<T, npuhal_amdxdna::errno::Errno> {
    for _ in 0..100 {
        match call() {
            Err(npuhal_amdxdna::errno::Errno::EINTR) => {}
            result => return result,
        }
    }
    call()
}

fn remedy_of(error: &DeviceError) -> Vec<Remedy> {
    let remedy = match error {
        DeviceError::Driver { remedy, .. }
        | DeviceError::Unavailable { remedy, .. }
        | DeviceError::OutOfMemory { remedy, .. }
        | DeviceError::Unsupported { remedy, .. } => remedy.as_str(),
        _ => "",
    };
    match remedy {
        "" | "run `npuhal doctor`" => {
            vec![Remedy::command("read what the driver says", "sudo dmesg | grep -i amdxdna")]
        }
        _ => vec![Remedy::command(remedy, "sudo dmesg | grep -i amdxdna")],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use npuhal_amdxdna::discovery::{Roots, enumerate};
    use std::fs;
    use std::os::unix::fs::symlink;

    /// A node that opens and is not the driver's.
    #[test]
    fn a_node_of_another_kind_is_a_failed_device_and_no_context_is_tried() {
        let root = tempfile::tempdir().unwrap();
        let device = root.path().join("sys/bus/pci/devices/0000:c5:00.1");
        fs::create_dir_all(device.join("accel/accel0")).unwrap();
        for (name, text) in [("vendor", "0x1022"), ("device", "0x1502"), ("revision", "0x00")] {
            fs::write(device.join(name), text).unwrap();
        }
        fs::create_dir_all(root.path().join("dev/accel")).unwrap();
        let npus = enumerate(&Roots::inside(root.path()));
        for (node, wanted) in [("/dev/null", "asking the driver for its version failed"), ("/nonexistent", "opening")] {
            let link = root.path().join("dev/accel/accel0");
            let _ = fs::remove_file(&link);
            symlink(node, &link).unwrap();
            let mut list = List::default();
            examine_found(&mut list, &npus[0], &[]);
            let [check] = &list.checks[..] else { panic!("{list:?}") };
            assert_eq!((check.name, check.status), ("device", Status::Fail));
            assert!(check.issues[0].contains(wanted), "{check:?}");
            assert!(!check.remedies.is_empty() && list.not_tried.is_empty(), "{list:?}");
        }
    }

    /// What a found NPU gets is what a virtual one gets: the same functions on the same driver trait.
    #[test]
    fn contexts_are_given_back_and_refusals_name_who_holds_the_device() {
        let (hardware, identity) = virtual_device(&"virtual:npu1?fault=ENODEV@context:1".parse().unwrap()).unwrap();
        let driver: Arc<dyn Driver> = hardware.connect();
        let device = NpuDevice::open(Arc::clone(&driver), &identity).unwrap();
        let check = context(driver.as_ref(), &device, &[]);
        assert_eq!(check.status, Status::Ok, "{check:?}");
        assert_eq!((hardware.statistics().contexts, hardware.statistics().syncobjs), (0, 0));
        let check = context(driver.as_ref(), &device, &["flm (pid 7)".to_owned()]);
        assert_eq!(check.status, Status::Fail);
        let issue = &check.issues[0];
        assert!(issue.contains("creating a hardware context failed: no free range of columns"), "{issue}");
        assert!(issue.ends_with("held by flm (pid 7)"), "{issue}");
    }
}
