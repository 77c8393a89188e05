//! A route as a table.

use super::models::Purpose;
use super::{borrow, guarded, leak, session, write};
use npuhal_addon_abi as abi;
use npuhal_core::card::{Claim, DeviceCard};
use npuhal_core::device::Device;
use npuhal_core::stage::Placement;
use npuhal_core::stage::{Segment, Yields};
use npuhal_registry::{
    Decline, DeviceUri, ExpectedSpeed, Fitness, Host, OpenRequest, Reason, Route, RouteError, SegmentRequest, Service,
    SpeedClass,
};
use std::ffi::c_void;
use std::mem::size_of;

/// The table of `route`; it and its texts are leaked.
pub(super) fn table(route: &'static dyn Route) -> abi::RouteTable {
    let model_types = leak(route.model_types().iter().map(|&name| abi::Str::new(name.to_owned().leak())).collect());
    let option = |&key: &&str| abi::OptionSpec { key: abi::Str::new(key.to_owned().leak()), help: abi::Str::EMPTY };
    let options = leak(route.option_keys().iter().map(option).collect());
    abi::RouteTable {
        size_bytes: size_of::<abi::RouteTable>() as u32,
        flags: 0,
        name: abi::Str::new(route.name().to_owned().leak()),
        model_types: model_types.as_ptr(),
        model_types_len: model_types.len(),
        options: options.as_ptr(),
        options_len: options.len(),
        state: std::ptr::from_mut(Box::leak(Box::new(route))).cast::<c_void>(),
        fitness: Some(fitness),
        open: Some(open),
    }
}

/// The route behind a state of [`table`].
///
/// # Safety
/// The state is one of [`table`].
unsafe fn route(state: *mut c_void) -> &'static dyn Route {
    // SAFETY: the state is a leaked box of this type, which is never written to.
    unsafe { *state.cast::<&'static dyn Route>() }
}

unsafe extern "C" fn fitness(
    state: *mut c_void,
    request: *const abi::FitnessRequest,
    service: *mut abi::Service,
) -> i32 {
    // SAFETY: the host passes the state of the table and pointers that are valid during the call.
    let (route, request, service) = unsafe { (route(state), &*request, &mut *service) };
    let answer = guarded(|| -> Result<i32, String> {
        // SAFETY: as above.
        let model = unsafe { borrow::model(request.model, Purpose::Fitness) }?;
        // SAFETY: as above.
        let devices = unsafe { borrow::devices(request.devices, request.devices_len) };
        // SAFETY: as above.
        let options = unsafe { borrow::options(request.options) }?;
        let told = |code, reason: &Reason| {
            write(request.reason, &reason.0);
            Ok(code)
        };
        match route.fitness(&model, &devices, &options) {
            Fitness::Serves(found) => {
                *service = write_service(&found, &devices)?;
                write(request.detail, &found.detail);
                Ok(abi::fitness::SERVES)
            }
            Fitness::Declines(Decline::NotMine) => Ok(abi::fitness::NOT_MINE),
            Fitness::Declines(Decline::Unavailable(reason)) => told(abi::fitness::UNAVAILABLE, &reason),
            Fitness::Declines(Decline::Optional(reason)) => told(abi::fitness::OPTIONAL, &reason),
            Fitness::Declines(Decline::Required(reason)) => told(abi::fitness::REQUIRED, &reason),
        }
    });
    answer.and_then(|answer| answer).unwrap_or_else(|reason| {
        write(request.reason, &reason);
        abi::fitness::FAILED
    })
}

unsafe extern "C" fn open(state: *mut c_void, request: *const abi::OpenRequest, out: *mut abi::Session) -> i32 {
    // SAFETY: the host passes the state of the table and pointers that are valid during the call.
    let (route, request, out) = unsafe { (route(state), &*request, &mut *out) };
    let opened = guarded(|| -> Result<abi::Session, String> {
        // SAFETY: as above.
        let model = unsafe { borrow::model(request.model, Purpose::Opening) }?;
        // SAFETY: as above.
        let devices = unsafe { borrow::devices(request.devices, request.devices_len) };
        // SAFETY: as above.
        let options = unsafe { borrow::options(request.options) }?;
        // SAFETY: as above.
        let lent = unsafe { request.service.as_ref() }.ok_or("the host passed no service")?;
        let service = read_service(lent, &devices)?;
        let asked = OpenRequest {
            model: &model,
            service: &service,
            devices: &devices,
            options: &options,
            host: &FarHost { route: route.name() },
        };
        let opened = route.open(asked).map_err(|error| error.to_string())?;
        Ok(session::export(opened, request.describe))
    });
    match opened.and_then(|opened| opened) {
        Ok(session) => {
            *out = session;
            abi::status::OK
        }
        Err(reason) => {
            write(request.error, &reason);
            abi::status::FAILED
        }
    }
}

fn write_service(service: &Service, devices: &[DeviceCard]) -> Result<abi::Service, String> {
    let index = |id: &str| {
        let index = devices.iter().position(|card| card.id == id);
        index.map(|index| index as u32).ok_or_else(|| format!("it serves on {id}, which it was not offered"))
    };
    if service.placement.len() > abi::MAX_PLACEMENT {
        return Err(format!("a placement of {} parts; at most {} fit", service.placement.len(), abi::MAX_PLACEMENT));
    }
    let (tokens_per_second, claim) = match service.expected {
        None => (0.0, 0),
        Some(ExpectedSpeed { tokens_per_second, claim }) => {
            let claim = match claim {
                Claim::Published => abi::claim::PUBLISHED,
                Claim::Virtual => abi::claim::VIRTUAL,
                Claim::Modelled => abi::claim::MODELLED,
                Claim::Measured => abi::claim::MEASURED,
            };
            (tokens_per_second, claim)
        }
    };
    let mut written = abi::Service {
        device: index(&service.device)?,
        window: service.window,
        speed: match service.speed {
            SpeedClass::Reference => abi::speed::REFERENCE,
            SpeedClass::Hybrid => abi::speed::HYBRID,
            SpeedClass::Engine => abi::speed::ENGINE,
            SpeedClass::Lane => abi::speed::LANE,
            _ => abi::speed::CPU,
        },
        claim,
        tokens_per_second,
        memory_bytes: service.memory_bytes.unwrap_or(0),
        placement_len: service.placement.len() as u32,
        ..abi::Service::default()
    };
    for (out, part) in written.placement.iter_mut().zip(&service.placement) {
        let layer = |layer: usize| u32::try_from(layer).map_err(|_| format!("a placement of layer {layer}"));
        *out = abi::Placement {
            start: layer(part.layers.start)?,
            end: layer(part.layers.end)?,
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

fn read_service(lent: &abi::Service, devices: &[DeviceCard]) -> Result<Service, String> {
    let device = |index: u32| {
        let card = devices.get(index as usize);
        card.map(|card| card.id.clone()).ok_or_else(|| format!("the host names a device {index} that it did not offer"))
    };
    let claim = match lent.claim {
        abi::claim::PUBLISHED => Claim::Published,
        abi::claim::VIRTUAL => Claim::Virtual,
        abi::claim::MEASURED => Claim::Measured,
        _ => Claim::Modelled,
    };
    let parts = lent.placement.iter().take(lent.placement_len as usize);
    let placement = parts.map(|part| {
        Ok(Placement {
            layers: part.start as usize..part.end as usize,
            device: device(part.device)?,
            yields: match part.yields {
                abi::yields::HIDDEN => Yields::Hidden,
                abi::yields::NORMED => Yields::Normed,
                _ => Yields::Logits,
            },
        })
    });
    Ok(Service {
        device: device(lent.device)?,
        window: lent.window,
        placement: placement.collect::<Result<_, String>>()?,
        speed: match lent.speed {
            abi::speed::REFERENCE => SpeedClass::Reference,
            abi::speed::HYBRID => SpeedClass::Hybrid,
            abi::speed::ENGINE => SpeedClass::Engine,
            abi::speed::LANE => SpeedClass::Lane,
            _ => SpeedClass::Cpu,
        },
        expected: (lent.tokens_per_second > 0.0)
            .then_some(ExpectedSpeed { tokens_per_second: lent.tokens_per_second, claim }),
        memory_bytes: (lent.memory_bytes != 0).then_some(lent.memory_bytes),
        kernels: Vec::new(),
        detail: String::new(),
    })
}

/// The host, seen from the other side of the border: its devices and segments do not come over.
struct FarHost<'a> {
    route: &'a str,
}

impl FarHost<'_> {
    fn out_of_reach(&self, what: &str) -> RouteError {
        let reason = format!("a loaded add-on cannot open {what} of npuhal; link the add-on into a program instead");
        RouteError::Declined { route: self.route.to_owned(), reason: Reason(reason) }
    }
}

impl Host for FarHost<'_> {
    fn open_device(&self, id: &str) -> Result<Box<dyn Device>, RouteError> {
        Err(self.out_of_reach(&format!("the device {id}")))
    }

    fn open_segment(&self, route: &str, _: SegmentRequest<'_>) -> Result<Box<dyn Segment>, RouteError> {
        Err(self.out_of_reach(&format!("a segment of the route {route}")))
    }

    fn pinned(&self) -> Option<&DeviceUri> {
        None
    }
}
