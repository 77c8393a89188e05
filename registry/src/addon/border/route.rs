//! A route of a library.

use super::lent::Lent;
use super::read::{self, Fault, array, function, line, printable, text, text_ref};
use super::session;
use super::sink::Collector;
use super::{MAX_ENTRIES, MAX_LINE_BYTES, MAX_NAME_BYTES, Owner, State};
use crate::options::Options;
use crate::route::{Decline, ExpectedSpeed, Fitness, OpenRequest, Reason, Route, RouteError, Service, SpeedClass};
use npuhal_addon_abi as abi;
use npuhal_core::card::{Claim, DeviceCard};
use npuhal_core::stage::{Placement, Session, Yields};
use npuhal_models::ModelSource;
use npuhal_models::source::Format;
use std::ffi::c_void;
use std::mem::size_of;
use std::path::Path;
use std::sync::Arc;

type FitnessFunction = unsafe extern "C" fn(*mut c_void, *const abi::FitnessRequest, *mut abi::Service) -> i32;
type OpenFunction = unsafe extern "C" fn(*mut c_void, *const abi::OpenRequest, *mut abi::Session) -> i32;

/// A route of a library. Texts that live as long as the process are the library's own.
pub(in crate::addon) struct LoadedRoute {
    name: String,
    model_types: Vec<&'static str>,
    option_keys: Vec<&'static str>,
    is_optional: bool,
    owner: Owner,
    state: State,
    fitness: FitnessFunction,
    open: OpenFunction,
}

impl LoadedRoute {
    /// Checks and copies `table`; with it the keys of its options and their lines for people.
    ///
    /// # Safety
    /// What the table points at is as the interface says, as long as the process lives.
    pub(super) unsafe fn read(
        table: &abi::RouteTable,
        file: &Arc<Path>,
    ) -> Result<(Self, Vec<(String, String)>), Fault> {
        read::size(table.size_bytes, size_of::<abi::RouteTable>(), "size")?;
        // SAFETY: the caller's promise.
        let name = unsafe { text(table.name, MAX_NAME_BYTES, "name")? };
        printable(&name, "name")?;
        if table.flags & !abi::route_flags::OPTIONAL != 0 {
            return Err(Fault::new("flags", format!("{:#x} has unknown bits", table.flags)));
        }
        // SAFETY: the caller's promise.
        let model_types = unsafe { array(table.model_types, table.model_types_len, MAX_ENTRIES, "model types")? };
        let model_types = model_types
            .iter()
            .map(|&model_type| {
                // SAFETY: the caller's promise.
                let model_type = unsafe { text_ref(model_type, MAX_NAME_BYTES, "model type")? };
                printable(model_type, "model type")?;
                Ok(model_type)
            })
            .collect::<Result<Vec<&'static str>, Fault>>()?;
        if model_types.is_empty() {
            return Err(Fault::new("model types", "there is none; wanted at least one, or '*' for all"));
        }
        // SAFETY: the caller's promise.
        let specs = unsafe { array(table.options, table.options_len, MAX_ENTRIES, "options")? };
        let (mut options, mut option_keys) = (Vec::new(), Vec::new());
        for spec in specs {
            // SAFETY: the caller's promise.
            let (key, help) = unsafe {
                (text_ref(spec.key, MAX_NAME_BYTES, "option key")?, text(spec.help, MAX_LINE_BYTES, "option help")?)
            };
            printable(key, "option key")?;
            line(&help, "option help")?;
            if key.contains('=') {
                return Err(Fault::new("option key", format!("'{key}' has an equals sign, which ends a key")));
            }
            option_keys.push(key);
            options.push((key.to_owned(), help));
        }
        let route = Self {
            owner: Owner::new(file, "route", &name),
            name,
            model_types,
            option_keys,
            is_optional: table.flags & abi::route_flags::OPTIONAL != 0,
            state: State(table.state),
            fitness: function(table.fitness, "fitness")?,
            open: function(table.open, "open")?,
        };
        Ok((route, options))
    }

    fn ask(&self, model: &ModelSource, devices: &[DeviceCard], options: &Options) -> Result<Fitness, String> {
        // An add-on that cannot be told would compute something else.
        if let Some(extra) = model.config().first_extra() {
            let reason = format!("the model has {extra}, which the interface of loaded add-ons cannot express");
            return Ok(Fitness::Declines(Decline::Unavailable(Reason(reason))));
        }
        let lent = Lent::new(model, devices, options).ok_or(NOT_UTF8)?;
        let (mut reason, mut detail, mut service) =
            (Collector::default(), Collector::default(), abi::Service::default());
        let request = abi::FitnessRequest {
            size_bytes: size_of::<abi::FitnessRequest>() as u32,
            reserved: 0,
            model: &raw const lent.model,
            devices: lent.devices.as_ptr(),
            devices_len: lent.devices.len(),
            options: &raw const lent.options,
            reason: reason.sink(),
            detail: detail.sink(),
        };
        // SAFETY: the library's own function and state; all pointers are valid for the call.
        let answer = unsafe { (self.fitness)(self.state.0, &raw const request, &raw mut service) };
        let declined = match answer {
            abi::fitness::SERVES => {
                let service = read_service(&service, model, devices, detail.line());
                return service.map(Fitness::Serves).map_err(|fault| format!("{}: {}", fault.field, fault.reason));
            }
            abi::fitness::NOT_MINE => Decline::NotMine,
            abi::fitness::UNAVAILABLE if self.is_optional => Decline::Optional(Reason(reason.reason())),
            abi::fitness::UNAVAILABLE => Decline::Unavailable(Reason(reason.reason())),
            abi::fitness::OPTIONAL => Decline::Optional(Reason(reason.reason())),
            abi::fitness::REQUIRED => Decline::Required(Reason(reason.reason())),
            abi::fitness::FAILED => return Err(reason.reason()),
            other => return Err(format!("it answered {other}; wanted 0 to 5")),
        };
        Ok(Fitness::Declines(declined))
    }
}

impl Route for LoadedRoute {
    fn name(&self) -> &str {
        &self.name
    }

    fn model_types(&self) -> &[&str] {
        &self.model_types
    }

    fn option_keys(&self) -> &[&str] {
        &self.option_keys
    }

    fn fitness(&self, model: &ModelSource, devices: &[DeviceCard], options: &Options) -> Fitness {
        // A fault of the add-on is told even where the route is optional.
        self.ask(model, devices, options).unwrap_or_else(|reason| {
            Fitness::Declines(Decline::Unavailable(Reason(self.owner.failure("the fitness check", &reason))))
        })
    }

    fn open(&self, request: OpenRequest<'_>) -> Result<Session, RouteError> {
        let failed = |reason: String| RouteError::Backend { route: self.name.clone(), source: reason.into() };
        let OpenRequest { model, service, devices, options, .. } = request;
        let lent = Lent::new(model, devices, options).ok_or_else(|| failed(NOT_UTF8.to_owned()))?;
        let asked = write_service(service, devices).map_err(failed)?;
        let (mut error, mut describe, mut session) =
            (Collector::default(), Collector::default(), abi::Session::default());
        let request = abi::OpenRequest {
            size_bytes: size_of::<abi::OpenRequest>() as u32,
            reserved: 0,
            model: &raw const lent.model,
            devices: lent.devices.as_ptr(),
            devices_len: lent.devices.len(),
            service: &raw const asked,
            options: &raw const lent.options,
            error: error.sink(),
            describe: describe.sink(),
        };
        // SAFETY: the library's own function and state; all pointers are valid for the call.
        let status = unsafe { (self.open)(self.state.0, &raw const request, &raw mut session) };
        if status != abi::status::OK {
            return Err(failed(self.owner.failure("opening a session", &error.reason())));
        }
        // SAFETY: the session was just opened by the library, and nothing else has a copy of it.
        unsafe { session::adopt(session, model, service, &self.owner, describe.line()) }.map_err(|fault| {
            failed(self.owner.failure("opening a session", &format!("{}: {}", fault.field, fault.reason)))
        })
    }
}

const NOT_UTF8: &str = "the model's path is not UTF-8; loaded add-ons take UTF-8 paths only";

fn read_service(
    service: &abi::Service,
    model: &ModelSource,
    devices: &[DeviceCard],
    detail: String,
) -> Result<Service, Fault> {
    let device = |index: u32, field: &str| {
        let card = devices.get(index as usize);
        card.map(|card| card.id.clone())
            .ok_or_else(|| Fault::new(field, format!("there is no device {index}; {} were offered", devices.len())))
    };
    if service.window == 0 {
        return Err(Fault::new("window", "0 positions; wanted at least 1"));
    }
    let speed = match service.speed {
        abi::speed::REFERENCE => SpeedClass::Reference,
        abi::speed::CPU => SpeedClass::Cpu,
        abi::speed::HYBRID => SpeedClass::Hybrid,
        abi::speed::ENGINE => SpeedClass::Engine,
        abi::speed::LANE => SpeedClass::Lane,
        other => return Err(Fault::new("speed", format!("{other}; wanted 0 to 4"))),
    };
    let claim = match service.claim {
        abi::claim::PUBLISHED => Claim::Published,
        abi::claim::VIRTUAL => Claim::Virtual,
        abi::claim::MODELLED => Claim::Modelled,
        abi::claim::MEASURED => Claim::Measured,
        other => return Err(Fault::new("claim", format!("{other}; wanted 0 to 3"))),
    };
    let tokens_per_second = service.tokens_per_second;
    if !tokens_per_second.is_finite() || tokens_per_second < 0.0 {
        return Err(Fault::new("tokens_per_second", format!("{tokens_per_second}; wanted a number from 0")));
    }
    let main = device(service.device, "device")?;
    // Of a model that npuhal did not read the add-on alone knows how many layers there are.
    let used = &service.placement[..(service.placement_len as usize).min(abi::MAX_PLACEMENT)];
    let layers = match model.format() {
        Format::Unread => used.last().map_or(0, |part| part.end as usize),
        _ => model.config().layers,
    };
    let placement = match service.placement_len as usize {
        0 => vec![Placement { layers: 0..layers, device: main.clone(), yields: Yields::Logits }],
        len if len > abi::MAX_PLACEMENT => {
            let reason = format!("{len} entries; at most {} fit", abi::MAX_PLACEMENT);
            return Err(Fault::new("placement", reason));
        }
        len => read_placement(&service.placement[..len], layers, device)?,
    };
    Ok(Service {
        device: main,
        window: service.window,
        placement,
        speed,
        expected: (tokens_per_second > 0.0).then_some(ExpectedSpeed { tokens_per_second, claim }),
        memory_bytes: (service.memory_bytes > 0).then_some(service.memory_bytes),
        kernels: Vec::new(),
        detail,
    })
}

fn read_placement(
    placement: &[abi::Placement],
    layers: usize,
    device: impl Fn(u32, &str) -> Result<String, Fault>,
) -> Result<Vec<Placement>, Fault> {
    let mut next = 0;
    let mut read = Vec::new();
    for part in placement {
        let (start, end) = (part.start as usize, part.end as usize);
        if start != next || end < start || end > layers {
            let reason =
                format!("layers {start}..{end} after layer {next} of {layers}; wanted parts in order without a gap");
            return Err(Fault::new("placement", reason));
        }
        next = end;
        let yields = match part.yields {
            abi::yields::HIDDEN => Yields::Hidden,
            abi::yields::NORMED => Yields::Normed,
            abi::yields::LOGITS => Yields::Logits,
            other => return Err(Fault::new("placement", format!("yields {other}; wanted 0 to 2"))),
        };
        read.push(Placement { layers: start..end, device: device(part.device, "placement")?, yields });
    }
    if next != layers {
        return Err(Fault::new("placement", format!("it ends at layer {next} of {layers}")));
    }
    Ok(read)
}

fn write_service(service: &Service, devices: &[DeviceCard]) -> Result<abi::Service, String> {
    let index = |id: &str| {
        let index = devices.iter().position(|card| card.id == id);
        index.map(|index| index as u32).ok_or_else(|| format!("device {id} is not among the usable devices"))
    };
    let mut written = abi::Service {
        device: index(&service.device)?,
        window: service.window,
        speed: match service.speed {
            SpeedClass::Reference => abi::speed::REFERENCE,
            SpeedClass::Cpu => abi::speed::CPU,
            SpeedClass::Hybrid => abi::speed::HYBRID,
            SpeedClass::Engine => abi::speed::ENGINE,
            SpeedClass::Lane => abi::speed::LANE,
        },
        memory_bytes: service.memory_bytes.unwrap_or(0),
        placement_len: service.placement.len() as u32,
        ..abi::Service::default()
    };
    if let Some(expected) = service.expected {
        written.tokens_per_second = expected.tokens_per_second;
        written.claim = match expected.claim {
            Claim::Published => abi::claim::PUBLISHED,
            Claim::Virtual => abi::claim::VIRTUAL,
            Claim::Modelled => abi::claim::MODELLED,
            Claim::Measured => abi::claim::MEASURED,
        };
    }
    if service.placement.len() > abi::MAX_PLACEMENT {
        return Err(format!("a placement of {} parts; at most {} fit", service.placement.len(), abi::MAX_PLACEMENT));
    }
    for (out, part) in written.placement.iter_mut().zip(&service.placement) {
        *out = abi::Placement {
            start: part.layers.start as u32,
            end: part.layers.end as u32,
            device: index(&part.device)?,
            yields: match part.yields {
                Yields::Hidden => abi::yields::HIDDEN,
                Yields::Normed => abi::yields::NORMED,
                Yields::Logits => abi::yields::LOGITS,
            },
        };
    }
    Ok(written)
}
